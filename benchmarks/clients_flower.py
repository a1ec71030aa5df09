"""The job of `clients.py` under Flower's simulation: FedAvg on softmax regression in numpy."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Message
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


@functools.cache
def data(folder):
    """The arrays of the job, read once in each process."""
    with np.load(Path(folder) / "data.npz") as file:
        return {name: file[name] for name in file.files}


def softmax(weight, bias, x):
    """Probabilities of the classes."""
    logits = x @ weight + bias
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def training(folder, steps, batch):
    """Return the function that trains a client, which does not need this process's arguments."""

    def train(message, context):
        found, number = data(folder), int(context.node_config["partition-id"])
        ends = found["ends"]
        own = found["order"][ends[number - 1] if number else 0 : ends[number]]
        weight, bias = (array.copy() for array in message.content["arrays"].to_numpy_ndarrays())
        random = np.random.default_rng()
        for _ in range(steps):
            chosen = own[random.integers(0, len(own), batch)]
            x, error = found["x"][chosen], softmax(weight, bias, found["x"][chosen])
            error[np.arange(batch), found["y"][chosen]] -= 1
            weight -= 1.0 / batch * (x.T @ error)
            bias -= 1.0 / batch * error.sum(0)
        content = {"arrays": ArrayRecord([weight, bias]), "metrics": MetricRecord({"num-examples": len(own)})}
        return Message(content=RecordDict(content), reply_to=message)

    return train


def simulate(folder, *numbers):
    """Hold the rounds, and print the accuracy of the last model."""
    clients, rounds, participants, steps, batch = map(int, numbers)
    client, server = ClientApp(), ServerApp()
    client.train()(training(folder, steps, batch))
    found = data(folder)

    def evaluate(number, arrays):
        right = softmax(*arrays.to_numpy_ndarrays(), found["test_x"]).argmax(1) == found["test_y"]
        return MetricRecord({"accuracy": float(right.mean())})

    @server.main()
    def main(grid, context):
        features, classes = found["x"].shape[1], int(found["y"].max()) + 1
        initial = ArrayRecord([np.zeros((features, classes), np.float32), np.zeros(classes, np.float32)])
        rule = FedAvg(fraction_train=participants / clients, fraction_evaluate=0.0, min_available_nodes=clients)
        result = rule.start(grid=grid, initial_arrays=initial, num_rounds=rounds, evaluate_fn=evaluate)
        print("accuracy", result.evaluate_metrics_serverapp[rounds]["accuracy"], flush=True)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app=server, client_app=client, num_supernodes=clients, backend_config=resources)

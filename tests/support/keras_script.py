"""A script of Keras's users, for tests: several calls of fit on the workers of one run, on the backend argv[1].

The same model is trained in a loop of PyTorch, too. `results-RANK` holds what the tests compare.
"""

import json
import os
import sys
from pathlib import Path

sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "WithoutCompiler"]  # Keras needs torch's
os.environ["KERAS_BACKEND"] = BACKEND = sys.argv[1]
import keras  # noqa: E402
import numpy as np  # noqa: E402

import flockstep  # noqa: E402
from flockstep.errors import FlockstepError  # noqa: E402
from flockstep.keras import Flockstep  # noqa: E402

HERE = Path(__file__).parent
RANK, WORKERS = flockstep.rank(), flockstep.workers()
random = np.random.default_rng(1)
SAMPLES = random.normal(size=(64, 4)).astype("float32")
WEIGHTS = [random.normal(size=shape).astype("float32") * 0.5 for shape in ((4, 8), (8,), (8, 2), (2,))]
RATE, MOMENTUM, EPOCHS, BATCH = 0.1, 0.5, 3, 4


class Noting(keras.callbacks.Callback):
    """Notes the weights at the end of each validation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_test_end(self, logs=None):
        self.seen.append(flat(self.model))


def flat(model):
    return np.concatenate(
        [each.numpy().ravel() if hasattr(each, "numpy") else np.ravel(each) for each in weights_of(model)]
    )


def weights_of(model):
    return [keras.ops.convert_to_numpy(each) for each in model.trainable_variables]


def model_of(normalized=False):
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
    if normalized:
        layers.insert(1, keras.layers.BatchNormalization())
    model = keras.Sequential([keras.Input((4,)), *layers])
    if not normalized:
        model.set_weights([(1 + RANK) * each for each in WEIGHTS])  # rank 0's count
    model.compile(optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM), loss="mse")
    return model


def part(all_ranks=False):
    x = SAMPLES if all_ranks else SAMPLES[RANK::WORKERS]
    return {"x": x, "y": x[:, :2], "batch_size": BATCH * (WORKERS if all_ranks else 1), "shuffle": False, "verbose": 0}


def fitted(strategy, epochs=EPOCHS, **options):
    model, noting = model_of(), Noting()
    callbacks = [Flockstep(strategy, **options), noting]
    history = model.fit(
        **part(),
        epochs=epochs,
        callbacks=callbacks,
        validation_data=(SAMPLES, SAMPLES[:, :2]),
        validation_batch_size=64,
    ).history
    return {"weights": flat(model), "validated": noting.seen, "losses": history["val_loss"]}


def plain():
    model = model_of()
    model.set_weights(WEIGHTS)
    model.fit(**part(all_ranks=True), epochs=EPOCHS)
    return flat(model)


def twice():
    """The replica at the end of a fit of replicas that stay equal, after one in which the ranks' momenta came apart."""
    model = model_of()
    model.fit(**part(), callbacks=[Flockstep("local_sgd(period=3)")])
    callback, seen = Flockstep("all_reduce"), []
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(callback._weights.flat.copy()))
    model.fit(**part(), callbacks=[callback, noting])
    return seen[0]


def normalized():
    model = model_of(normalized=True)
    model.fit(**part(), callbacks=[Flockstep("all_reduce")])
    return np.concatenate([np.ravel(each) for each in model.get_weights()])


def in_torch(strategy):
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), WEIGHTS, strict=True):
            parameter.copy_(torch.tensor(value.T))
    inner = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer = flockstep.distribute(net, inner, strategy)
    mine = torch.tensor(SAMPLES[RANK::WORKERS])
    for _ in range(EPOCHS):
        for x in mine.split(BATCH):
            optimizer.zero_grad()
            (net(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
    optimizer.finish()
    return np.concatenate([each.detach().numpy().T.ravel() for each in net.parameters()])


def own_loop():
    """The weights after a loop without fit, with the optimizers of the backend's own library."""
    model = model_of()
    batches = [SAMPLES[RANK::WORKERS][at : at + BATCH] for at in range(0, len(SAMPLES) // WORKERS, BATCH)] * EPOCHS
    if BACKEND == "torch":
        import torch

        trained = [each for each in model.parameters() if each.requires_grad]
        inner = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)
        optimizer = flockstep.distribute(model, inner, "all_reduce")
        for x in map(torch.tensor, batches):
            optimizer.zero_grad()
            (model(x, training=True) - x[:, :2]).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        return flat(model)
    import jax
    import optax

    from flockstep.jax import distribute

    def loss(params, x):
        outputs, _ = model.stateless_call(params, [], x, training=True)
        return ((outputs - x[:, :2]) ** 2).mean()

    start = [each.value for each in model.trainable_variables]
    with distribute(start, optax.sgd(RATE, momentum=MOMENTUM), "all_reduce") as trainer:
        params = trainer.params
        for x in batches:
            params = trainer.step(jax.grad(loss)(params, x))
    for variable, value in zip(model.trainable_variables, trainer.params, strict=True):
        variable.assign(value)
    return flat(model)


class Own(keras.Model):
    def call(self, x):
        return x[:, :2]

    def train_step(self, *given):
        return {}


def refused(attempt):
    try:
        attempt()
    except FlockstepError as error:
        return str(error)
    return ""


def refusals():
    own = Own()
    own.compile(optimizer="sgd", loss="mse")
    averaging = model_of()
    averaging.compile(optimizer=keras.optimizers.SGD(0.1, use_ema=True), loss="mse")
    return {
        "servers": refused(lambda: Flockstep("ps(consistency=bsp)")),
        "average": refused(lambda: averaging.fit(**part(), callbacks=[Flockstep("all_reduce")])),
        "step": refused(lambda: own.fit(**part(), callbacks=[Flockstep("all_reduce")])),
    }


STRATEGIES = ("all_reduce", "local_sgd(period=3)")
results = {
    **{strategy: fitted(strategy) for strategy in STRATEGIES},
    "servers": fitted("ps(consistency=ssp(3))", optimizer=f"sgd(lr={RATE}, momentum={MOMENTUM})"),
    "plain": plain(),
    "own loop": own_loop(),
    "twice": twice(),
    "normalized": normalized(),
    "torch": {strategy: in_torch(strategy) for strategy in STRATEGIES},
    "refusals": refusals(),
    "backend": keras.backend.backend(),
}
(HERE / f"results-{RANK}.json").write_text(json.dumps(results, default=lambda array: array.tolist()))

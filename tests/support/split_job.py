"""Job file of a chain of layers with batch normalization, for runs of processes."""

from torch import nn

from support.split_jobs import chain, job_of


def model() -> nn.Sequential:
    """The chain with batch normalization in the first and in the last stage of two."""
    layers = list(chain())
    norms = nn.BatchNorm1d(8).double(), nn.BatchNorm1d(5).double()
    return nn.Sequential(*layers[:1], norms[0], *layers[1:7], norms[1], *layers[7:])


def job():
    """The regression of `split_jobs`."""
    return job_of(model, optimizer="sgd(lr=0.2, momentum=0.9)")

"""A script of Lightning's users, for tests: several fits on the workers of one run, and plain Lightning as the oracle.

Lightning takes long to import; therefore one run makes all of them. `results-RANK` holds what the tests compare.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "WithoutCompiler"]  # of the tests
sys.modules.pop("torch._dynamo", None)  # Lightning needs torch's own
warnings.simplefilter("ignore")
PACKAGE = sys.argv[1]
if PACKAGE == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
else:
    import pytorch_lightning as pl
    from lightning_fabric import Fabric

import flockstep  # noqa: E402
from flockstep.errors import FlockstepError  # noqa: E402
from flockstep.lightning import FlockstepFabricStrategy, FlockstepStrategy  # noqa: E402

HERE = Path(__file__).parent
RANK, WORKERS = flockstep.rank(), flockstep.workers()
SAMPLES = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def loss_of(net, x):
    return (net(x) - x[:, :2]).square().mean()


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.validated, self.losses = [], []

    def training_step(self, batch, index):
        loss = loss_of(self.net, batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", loss_of(self.net, batch[0]), sync_dist=True)
        self.validated.append(flat(self.net))

    def on_train_epoch_end(self):
        self.losses.append(float(loss_of(self.net, SAMPLES)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Gan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(3, 4), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        (x,) = batch
        fake = self.generator(x[:, :3])
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_discriminator)
        of_discriminator.zero_grad()
        self.manual_backward((self.discriminator(fake.detach()) - self.discriminator(x)).tanh().mean())
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        of_generator.zero_grad()
        self.manual_backward(-self.discriminator(fake).tanh().mean())
        of_generator.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


def loader(strategy, size=4):
    if strategy is not None:
        return DataLoader(TensorDataset(SAMPLES), batch_size=size)
    everything = DistributedSampler(SAMPLES, num_replicas=1, rank=0)  # the order in which Lightning deals them out
    return DataLoader(TensorDataset(SAMPLES), batch_size=size * WORKERS, sampler=everything)


def trainer(strategy, folder=None, **options):
    given = {"strategy": FlockstepStrategy(strategy)} if strategy is not None else {}
    saving = {"default_root_dir": HERE / folder} if folder else {"enable_checkpointing": False}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"max_epochs": 3, "accelerator": "cpu", "num_sanity_val_steps": 0, **given, **saving, **quiet, **options}
    return pl.Trainer(**chosen)


def fitted(strategy, model=None, folder=None, ckpt_path=None, **options):
    model, made = Net() if model is None else model, trainer(strategy, folder, **options)
    validation = DataLoader(TensorDataset(SAMPLES), batch_size=32) if isinstance(model, Net) else None
    made.fit(model, loader(strategy), validation, ckpt_path=ckpt_path)
    return model, made


def synchronous():
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    (ours, made), (theirs, plain) = fitted("all_reduce", **options), fitted(None, **options)
    logged = [{name: float(value) for name, value in each.callback_metrics.items()} for each in (made, plain)]
    return {"ours": flat(ours), "theirs": flat(theirs), "logged": logged, "steps": made.global_step}


def local(strategy):
    model, made = fitted(strategy, folder=strategy[:2])
    file = made.checkpoint_callback.best_model_path
    made.strategy.barrier()
    saved = torch.load(file, weights_only=False)["state_dict"]
    again, _ = fitted(strategy, folder=strategy[:2] + "again", ckpt_path=file, max_epochs=6)
    return {
        "result": flat(model),
        "validated": model.validated,
        "losses": model.losses + again.losses,
        "saved": torch.cat([each.flatten() for each in saved.values()]),
        "steps": made.global_step,
    }


def adversaries():
    return {"ours": flat(fitted("all_reduce", Gan())[0]), "theirs": flat(fitted(None, Gan())[0])}


def with_fabric(strategy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    chosen = {} if strategy is None else {"strategy": FlockstepFabricStrategy(strategy)}
    fabric = Fabric(accelerator="cpu", **chosen)
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9))
    size = 4 if strategy is not None else 4 * WORKERS
    batches = fabric.setup_dataloaders(DataLoader(TensorDataset(SAMPLES), batch_size=size))
    for _ in range(3):
        for index, (x,) in enumerate(batches):
            accumulating = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating and strategy is not None):
                fabric.backward(loss_of(model, x))
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
    total = fabric.all_reduce(torch.tensor(float(RANK + 1)), reduce_op="sum")
    gathered = fabric.all_gather(torch.tensor([float(RANK)]))
    if strategy is not None:
        fabric.save(HERE / "fabric.ckpt", {"model": model, "optimizer": optimizer})
        optimizer.finish()
        saved = fabric.load(HERE / "fabric.ckpt")["model"]
        assert torch.equal(torch.cat([each.flatten() for each in saved.values()]), flat(net))
    return flat(net), float(total), gathered.flatten().tolist()


def fabric_results():
    ours, total, gathered = with_fabric("all_reduce")
    return {"ours": ours, "theirs": with_fabric(None)[0], "total": total, "gathered": gathered}


def refused(make):
    try:
        make()
    except FlockstepError as error:
        return str(error)
    return ""


def refusals():
    by_value = trainer("all_reduce", gradient_clip_val=0.1, gradient_clip_algorithm="value")
    found = {
        "devices": refused(lambda: trainer("all_reduce", devices=3)),
        "batch norm": refused(lambda: fitted("all_reduce", sync_batchnorm=True)),
        "values": refused(lambda: by_value.fit(Net(), loader("all_reduce"))),
        "objects": refused(lambda: by_value.strategy.broadcast({1, 2})),
    }
    by_value.strategy.on_train_end()
    return {**found, "background": refused(lambda: fitted("slice_servers"))}


results = {
    "synchronous": synchronous(),
    "local": local("local_sgd(period=3)"),
    "servers": local("ps(consistency=ssp(3))"),
    "adversaries": adversaries(),
    "fabric": fabric_results(),
    "refusals": refusals(),
}
torch.save(results, HERE / f"results-{RANK}")

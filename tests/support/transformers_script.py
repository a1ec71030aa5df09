"""A script of Transformers' and Accelerate's users, for tests: several trainings on the workers of one run.

The oracle is the same script without flockstep in the same processes, where Accelerate wraps the model in DDP.
`results-RANK` holds what the tests compare.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader

sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "WithoutCompiler"]  # of the tests
sys.modules.pop("torch._dynamo", None)  # DDP needs torch's own
warnings.simplefilter("ignore")
from accelerate import Accelerator  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

import flockstep  # noqa: E402
from flockstep.accelerate import FlockstepAccelerator  # noqa: E402
from flockstep.errors import FlockstepError  # noqa: E402
from flockstep.transformers import FlockstepTrainer, open_group  # noqa: E402

HERE = Path(__file__).parent
RANK, WORKERS = flockstep.rank(), flockstep.workers()
CONFIG = GPT2Config(
    vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
open_group()


class Counting(torch.utils.data.Dataset):
    """Sequences that count: each token is the one before plus a step, modulo 16."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.arange(8).mul(1 + index % 3).add(index) % 16
        return {"input_ids": tokens, "labels": tokens}


def model_of(seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(CONFIG)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def arguments(folder, **options):
    chosen = {
        "output_dir": str(HERE / folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.02,
        "logging_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }
    return TrainingArguments(**chosen)


def losses(trainer, name="eval_loss"):
    return [each[name] for each in trainer.state.log_history if name in each]


def trainer_of(strategy, folder, **options):
    kind, more = (Trainer, {}) if strategy is None else (FlockstepTrainer, {"strategy": strategy})
    return kind(model_of(), arguments(folder, **options), train_dataset=Counting(96), eval_dataset=Counting(20), **more)


def synchronous():
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "epoch"}
    trained = {}
    for name, strategy in (("ours", "all_reduce"), ("theirs", None)):
        trainer = trainer_of(strategy, name, **options)
        trainer.train()
        model = getattr(trainer.model, "module", trainer.model)
        trained[name] = flat(model)
        trained[name + " logged"] = [losses(trainer, each) for each in ("loss", "eval_loss", "grad_norm")]
    return trained


def local(strategy):
    saving = {"save_strategy": "epoch", "eval_strategy": "epoch", "average_tokens_across_devices": False}
    trainer = trainer_of(strategy, strategy[:2], **saving)
    trainer.train()
    result, at_end = flat(trainer.model), losses(trainer)
    last = max((HERE / strategy[:2]).glob("checkpoint-*"), key=lambda each: int(each.name.partition("-")[2]))
    saved = flat(GPT2LMHeadModel.from_pretrained(last))
    again = trainer_of(strategy, strategy[:2], **{**saving, "num_train_epochs": 4})
    again.train(resume_from_checkpoint=str(last))
    return {"result": result, "saved": saved, "evaluated": at_end, "again": losses(again)}


def accelerated(strategy):
    options = {"gradient_accumulation_steps": 2, "cpu": True}
    if strategy is None:
        accelerator = Accelerator(**options)
    else:
        accelerator = FlockstepAccelerator(strategy, **options)
    plain = model_of()
    inner = torch.optim.AdamW(plain.parameters(), lr=0.02)
    optimizer, model, loader = accelerator.prepare(inner, plain, DataLoader(Counting(64), batch_size=4))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    total = float(accelerator.reduce(torch.tensor(RANK + 1.0)))
    gathered = accelerator.gather(torch.tensor([float(RANK)])).tolist()
    if strategy is not None:
        accelerator.save_state(str(HERE / "state"))
        accelerator.wait_for_everyone()  # rank 0 writes it
        before = flat(plain)
        with torch.no_grad():
            plain.transformer.wte.weight.zero_()
        accelerator.load_state(str(HERE / "state"))
        assert torch.equal(before, flat(plain))
        accelerator.finish()
    return flat(plain), total, gathered


def with_accelerate():
    ours, total, gathered = accelerated("all_reduce")
    return {"ours": ours, "theirs": accelerated(None)[0], "total": total, "gathered": gathered}


def refusal():
    accelerator = FlockstepAccelerator("all_reduce", cpu=True)
    model = model_of()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    except FlockstepError as error:
        return str(error)
    finally:
        accelerator.finish()
    return ""


results = {
    "synchronous": synchronous(),
    "local": local("local_sgd(period=3)"),
    "servers": local("ps(consistency=ssp(3))"),
    "accelerate": with_accelerate(),
    "refusal": refusal(),
}
torch.save(results, HERE / f"results-{RANK}")

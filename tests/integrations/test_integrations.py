"""In other people's training code: transformers, accelerate, Lightning, and what torch has beside its optimizers.

Each library trains one small network in float64 on the same batches, with accumulated and clipped gradients, warmed up
from zero; ``by_hand`` is the same in plain PyTorch. They agree, bit for bit where sums are taken in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, Dataset

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound, param_groups
from adabayes.diagnostics import Observer, regimes
from adabayes.optim import TWO_RATE_OPTIMIZERS
from tests.conftest import Maker, all_state, assert_same

CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK, AdaBound])
PAIR = pytest.mark.parametrize("cls", TWO_RATE_OPTIMIZERS)

BATCH, ACCUMULATE, BATCHES, STEPS = 8, 2, 8, 8  # four steps are an epoch
LR, DECAY, CLIP = 1e-2, 0.1, 0.25


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For tensors of a few numbers, threads that wait for one another cost more than all the rest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def new_process() -> None:
    """To accelerate, which keeps what the first Accelerator of a process was told, such as its precision."""
    AcceleratorState._reset_state(reset_partial_state=True)


class Net(nn.Module):
    """With biases and a norm, which shall not decay; gives its loss, as models of transformers do."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 8, dtype=dtype)
            self.norm = nn.LayerNorm(8, dtype=dtype)
            self.outer = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.outer(self.norm(self.inner(x)).tanh())
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(BATCHES * BATCH, 4, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}

    def batches(self) -> list[dict[str, Tensor]]:
        return list(self.loader())

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self, BATCH)


def warm_up_and_decay(step: int) -> float:
    """Return the factor of the Trainer's ``linear`` schedule: from zero, and to zero after the last step."""
    return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)


def optimizer_of(net: nn.Module, make: Maker) -> torch.optim.Optimizer:
    return make(param_groups(net, DECAY), lr=LR)


def by_hand(make: Maker) -> torch.optim.Optimizer:
    net, batches = Net(), Points().batches()
    optimizer = optimizer_of(net, make)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * warm_up_and_decay(step)
        optimizer.zero_grad()
        for i in range(ACCUMULATE):
            (net(**batches[(step * ACCUMULATE + i) % BATCHES])["loss"] / ACCUMULATE).backward()
        norm = clip_grad_norm_(net.parameters(), CLIP)
        assert norm > CLIP
        optimizer.step()
    return optimizer


# transformers


class InOrder(transformers.Trainer):
    """Takes examples as they come."""

    def get_train_dataloader(self) -> Any:
        assert isinstance(self.train_dataset, Points)
        return self.accelerator.prepare(self.train_dataset.loader())


def trainer_arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_grad_norm": CLIP,
        "warmup_steps": 2,
        "weight_decay": DECAY,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(str(folder), **{**settings, **options})


def trainer(folder: Path, make: Maker, how: str = "instance", **options: Any) -> transformers.Trainer:
    net = Net()
    given: dict[str, Any] = (
        {"optimizers": (optimizer_of(net, make), None)}
        if how == "instance"
        else {"optimizer_cls_and_kwargs": (make, {"lr": LR})}
    )
    return InOrder(net, trainer_arguments(folder, **options), train_dataset=Points(), **given)


def optimizer_in(training: transformers.Trainer) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    wrapper: Any = training.optimizer
    optimizer: torch.optim.Optimizer = wrapper.optimizer
    return optimizer


@CLASSES
@pytest.mark.parametrize("how", ["instance", "class"])
def test_the_trainer_equals_a_plain_loop(cls: Maker, how: str, tmp_path: Path) -> None:
    """Given an optimizer, or the class, for which it makes the groups itself."""
    training = trainer(tmp_path, cls, how)
    training.train()
    assert_same(optimizer_in(training), by_hand(cls))


@CLASSES
def test_the_trainer_resumes_in_the_middle_of_an_epoch_bit_for_bit(cls: Maker, tmp_path: Path) -> None:
    whole = trainer(tmp_path, cls, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(tmp_path, cls, "class")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(optimizer_in(resumed), optimizer_in(whole))


@PAIR
def test_the_trainers_warm_up_from_zero_leaves_each_group_its_base(cls: type[AdaBayes], tmp_path: Path) -> None:
    net = Net()
    groups = [{"params": net.inner.parameters(), "lr": 1e-2}, {"params": net.outer.parameters(), "lr": 1e-3}]
    optimizer = cls(groups, lr=1e-3, lr_sgd=0.2)
    training = InOrder(net, trainer_arguments(tmp_path), train_dataset=Points(), optimizers=(optimizer, None))
    started = []
    optimizer.register_step_pre_hook(lambda o, *_: started.append([group["lr"] for group in o.param_groups]))
    training.train()
    assert started[0] == [0, 0]
    assert started[2] == [1e-2, 1e-3]
    assert [group["base_lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    assert [group["lr_sgd"] for group in optimizer.param_groups] == pytest.approx([2.0, 0.2])


@PAIR
def test_a_transformer_trains_in_bf16_autocast_and_each_parameter_has_fp32_state(
    cls: type[AdaBayes], tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(16) % 8
    training = transformers.Trainer(
        model,
        trainer_arguments(tmp_path, bf16=True, logging_steps=1),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64,
        optimizer_cls_and_kwargs=(cls, {"lr": LR}),
    )
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    assert training.optimizer is not None
    state = training.optimizer.state
    assert set(state) == set(model.parameters())
    assert {entry.dtype for entries in state.values() for entry in entries.values()} == {torch.float32}


def test_given_the_class_the_trainer_takes_the_learning_rate_from_beside_it(tmp_path: Path) -> None:
    """Not from its own arguments."""
    training = transformers.Trainer(
        Net(), trainer_arguments(tmp_path, learning_rate=0.5), optimizer_cls_and_kwargs=(AdaBayes, {})
    )
    assert {group["lr"] for group in training.create_optimizer().param_groups} == {1e-3}


def test_the_trainer_knows_no_optimizer_by_the_name_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adabayes is not a valid OptimizerNames"):
        trainer_arguments(tmp_path, optim="adabayes")


# accelerate


@CLASSES
def test_accelerate_resumes_and_equals_a_plain_loop(cls: Maker, tmp_path: Path) -> None:
    def train(first: int, last: int, load: Path | None = None, save: Path | None = None) -> torch.optim.Optimizer:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        net = Net()
        optimizer = optimizer_of(net, cls)
        scheduler = LambdaLR(optimizer, warm_up_and_decay)
        net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, Points().loader(), scheduler)
        if load:
            accelerator.load_state(str(load))
        batches = list(loader) * 2
        for batch in batches[first * ACCUMULATE : last * ACCUMULATE]:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if save:
            accelerator.save_state(str(save))
        inner: torch.optim.Optimizer = optimizer.optimizer
        return inner

    whole = train(0, STEPS)
    train(0, 3, save=tmp_path / "saved")
    assert_same(train(3, STEPS, load=tmp_path / "saved"), whole)
    assert_same(whole, by_hand(cls))


# Lightning

LIGHTNING = pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",  # where there are more than two cores
)


class Module(lightning.LightningModule):
    def __init__(self, make: Maker, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = Net(dtype)
        self.make = make
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.net, self.make)
        scheduler = LambdaLR(optimizer, warm_up_and_decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lightning_trainer(**options: Any) -> lightning.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 2,  # not max_steps: with those, Lightning 2.6 ends the epoch that it resumes after a batch
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": CLIP,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{**settings, **options})


@LIGHTNING
@CLASSES
def test_lightning_equals_a_plain_loop(cls: Maker) -> None:
    training = lightning_trainer()
    training.fit(Module(cls), Points().loader())
    for a, b in zip(all_state(training.optimizers[0]), all_state(by_hand(cls))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)  # it takes the norm group by group, in another order


@LIGHTNING
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")
@CLASSES
def test_lightning_resumes_bit_for_bit(cls: Maker, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = lightning_trainer(enable_checkpointing=True, callbacks=[keep])
    whole.fit(Module(cls), Points().loader())
    resumed = lightning_trainer()
    resumed.fit(Module(cls), Points().loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert_same(resumed.optimizers[0], whole.optimizers[0])


@LIGHTNING
@PAIR
def test_state_and_diagnostics_are_reached_from_within_a_module(cls: type[AdaBayes]) -> None:
    """Where Lightning gives a wrapper that poses as an AdaBayes."""
    module, training = Module(cls), lightning_trainer()
    training.fit(module, Points().loader())
    wrapper: Any = module.optimizers()
    assert wrapper is not training.optimizers[0]
    assert wrapper.state is training.optimizers[0].state
    assert regimes(wrapper) == regimes(training.optimizers[0])


@LIGHTNING
@CLASSES
def test_lightning_trains_in_bf16_autocast_with_fp32_state(cls: Maker) -> None:
    module = Module(cls, torch.float32)
    training = lightning_trainer(precision="bf16-mixed")
    training.fit(module, Points(torch.float32).loader())
    assert math.fsum(module.losses[BATCHES:]) < math.fsum(module.losses[:BATCHES])
    state = training.optimizers[0].state
    assert {entry.dtype for entries in state.values() for entry in entries.values()} == {torch.float32}


@LIGHTNING
@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])
@pytest.mark.parametrize("fused", [None, True])
def test_lightning_refuses_to_clip_scaled_gradients_of_fused_true_alone(
    cls: type[AdaBayes], fused: bool | None
) -> None:
    """As for torch's fused optimizers, which unscale inside the step. Left out, we take the kernel all the same."""
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
    module = Module(partial(cls, fused=fused), torch.float32)
    training = lightning_trainer(plugins=[plugin])
    if fused:
        with pytest.raises(RuntimeError, match="Are you using a 'fused' optimizer"):
            training.fit(module, Points(torch.float32).loader())
    else:
        training.fit(module, Points(torch.float32).loader())
        assert training.optimizers[0].state[module.net.inner.weight]["step"].item() == STEPS


# What libraries wrap an optimizer in


def lightning_wrapped(net: Net, optimizer: torch.optim.Optimizer) -> Any:
    return lightning.Fabric(accelerator="cpu", devices=1).setup(net, optimizer)[1]


def accelerate_wrapped(net: Net, optimizer: torch.optim.Optimizer) -> Any:
    return Accelerator(cpu=True).prepare(optimizer)


@PAIR
@pytest.mark.parametrize("wrap", [lightning_wrapped, accelerate_wrapped])
def test_state_and_diagnostics_are_reached_through_a_wrapper(cls: type[AdaBayes], wrap: Callable[..., Any]) -> None:
    net = Net()
    optimizer = cls(net.named_parameters(), fused=True)
    wrapped = wrap(net, optimizer)
    observer = Observer(wrapped)
    for _ in range(2):
        net(**Points().batches()[0])["loss"].backward()
        wrapped.step()
    assert wrapped.state is optimizer.state
    assert regimes(wrapped) == regimes(optimizer)
    assert len(observer.points()) == len(list(net.parameters()))
    state = wrapped.state[net.inner.weight]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])  # noticed by the kernel
    assert net.inner.weight.grad is not None
    net.inner.weight.grad.zero_()
    before = net.inner.weight.detach().clone()
    wrapped.step()
    assert torch.equal(net.inner.weight, before)


# Plain PyTorch


@PAIR
@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_scaled_accumulated_unscaled_and_clipped_equals_unscaled_training(
    cls: type[AdaBayes], form: dict[str, Any]
) -> None:
    """Bit for bit: scales are powers of two."""
    nets = Net(torch.float32), Net(torch.float32)
    scaled, plain = (cls(net.parameters(), lr=LR, **form) for net in nets)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    batches = Points(torch.float32).batches()
    for first in range(0, BATCHES, ACCUMULATE):
        for batch in batches[first : first + ACCUMULATE]:
            scaler.scale(nets[0](**batch)["loss"] / ACCUMULATE).backward()
            (nets[1](**batch)["loss"] / ACCUMULATE).backward()
        scaler.unscale_(scaled)
        assert clip_grad_norm_(nets[0].parameters(), CLIP) == clip_grad_norm_(nets[1].parameters(), CLIP) > CLIP
        scaler.step(scaled)
        scaler.update()
        plain.step()
        for optimizer in (scaled, plain):
            optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**12
    assert_same(scaled, plain)


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBound])  # not AdaBayesK: see docs/caveats.md
@pytest.mark.parametrize("clip", [partial(clip_grad_norm_, max_norm=CLIP), partial(clip_grad_value_, clip_value=0.02)])
def test_accumulated_and_clipped_gradients_equal_the_big_batch(cls: Maker, clip: Callable[..., Any]) -> None:
    nets = Net(), Net()
    optimizers = [cls(net.parameters(), lr=LR) for net in nets]
    points = Points()
    for _ in range(5):
        for batch in points.batches():
            (nets[0](**batch)["loss"] / BATCHES).backward()
        nets[1](points.x, points.labels)["loss"].backward()
        for net, optimizer in zip(nets, optimizers):
            clip(net.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)  # sums in another order


@CLASSES
def test_a_step_for_each_parameter_inside_backward_equals_the_usual_one(cls: Maker) -> None:
    """So that no more than one gradient is alive at a time."""
    fused, usual = Net(), Net()
    optimizer = cls(usual.parameters(), lr=LR, weight_decay=DECAY)
    own: dict[Tensor, torch.optim.Optimizer] = {p: cls([p], lr=LR, weight_decay=DECAY) for p in fused.parameters()}

    def step(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step)
    for batch in Points().batches():
        fused(**batch)["loss"].backward()
        assert all(p.grad is None for p in own)
        optimizer.zero_grad()
        usual(**batch)["loss"].backward()
        optimizer.step()
    for p, q in zip(own, usual.parameters()):
        assert torch.equal(p, q)
        assert all(torch.equal(own[p].state[p][name], entry) for name, entry in optimizer.state[q].items())


@CLASSES
def test_an_exponential_average_of_the_weights_is_the_one_by_hand(cls: Maker) -> None:
    net = Net()
    optimizer = cls(net.parameters(), lr=LR)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected: list[Tensor] = []
    for batch in Points().batches():
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        optimizer.step()
        averaged.update_parameters(net)
        now = [p.detach().clone() for p in net.parameters()]
        expected = [0.9 * e + 0.1 * p for e, p in zip(expected, now)] if expected else now
    for p, e in zip(averaged.parameters(), expected):
        torch.testing.assert_close(p, e, rtol=0, atol=1e-14)


@CLASSES
def test_stochastic_weight_averaging_is_the_one_by_hand(cls: Maker) -> None:
    """With its scheduler, and the statistics of batch norm taken anew."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = cls(net.parameters(), lr=LR)
    scheduler = SWALR(optimizer, swa_lr=LR / 10, anneal_epochs=2)
    averaged = AveragedModel(net)
    batches = [(batch["x"], batch["labels"]) for batch in Points().batches()]
    seen: list[list[Tensor]] = []
    for x, labels in batches:
        optimizer.zero_grad()
        cross_entropy(net(x), labels).backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(net)
        seen.append([p.detach().clone() for p in net.parameters()])
    update_bn(batches, averaged)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 10)
    for p, history in zip(averaged.parameters(), zip(*seen)):
        torch.testing.assert_close(p, torch.stack(history).mean(0), rtol=0, atol=1e-14)
    assert isinstance(averaged.module, nn.Sequential)
    hidden = averaged.module[0](Points().x)  # BatchNorm's input; momentum=None is the plain mean over batches
    torch.testing.assert_close(averaged.module[1].running_mean, hidden.detach().mean(0))

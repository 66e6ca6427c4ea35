"""TorchState: every bit of a training comes back, and what cannot be kept is refused by name."""

import json
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torchmetrics import MeanMetric

from powerguard.trainer.store.items import Loaded
from powerguard.trainer.store.shards import Snapshot
from powerguard.trainer.torch.state import INDEX, TorchState
from powerguard.trainer.torch.tree import DTYPES, Packer, StateError, Unpacker
from tests.torch.kept import bytes_of, carried, from_device, held, kept


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def round_trip(value: object) -> Any:
    packer = Packer()
    node = packer.pack("it", value)
    return Unpacker(kept(packer.items)).unpack("it", node)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and bytes(bytes_of(one.contiguous())) == bytes(bytes_of(other.contiguous()))


# --- Tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    """Random bytes, so that NaNs with payloads, denormals and both zeros are among them."""
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    noise = torch.randint(
        0, 2 if dtype == "bool" else 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8
    )
    if tensor.numel():
        bytes_of(tensor)[:] = bytes(noise.tolist())
    back = round_trip(tensor)
    assert same_bits(tensor, back)
    assert back.is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.ones(1).expand(4, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(6)[2:],
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "conjugated", "negative", "offset"],
)
def test_what_does_not_lie_in_order_comes_back_as_a_copy_of_it_would_lie(tensor: torch.Tensor) -> None:
    back = round_trip(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_single_element_of_any_stride_is_kept(*, frozen: bool) -> None:
    """As a column of a table that has one row; torch then calls it contiguous, whatever its stride."""

    def made() -> tuple[nn.Module, TorchState]:
        model = nn.Linear(2, 2)
        model.register_buffer("phase", torch.randn(1, 3, dtype=torch.complex64)[:, 0])
        model.scale = nn.Parameter(torch.ones(1, 3)[:, 0], requires_grad=False)
        return model, TorchState(model=model, keep_frozen=not frozen)

    (one, old), (other, new) = made(), made()
    with Snapshot(copier=old.copier) as snapshot:
        new.load(held(snapshot, snapshot.take(old.items())))
    assert same_bits(one.phase, other.phase)


def test_tied_tensors_are_kept_once_and_stay_tied() -> None:
    weight = torch.randn(100)
    packer = Packer()
    node = packer.pack("it", {"a": weight, "b": weight, "half": weight[:50], "empty": torch.empty(0)})
    assert [item.size_bytes for item in packer.items] == [400, 200, 0]
    back = Unpacker(kept(packer.items)).unpack("it", node)
    assert back["a"] is back["b"]
    assert torch.equal(back["half"], weight[:50])


def test_all_is_unpacked_on_the_cpu_on_request() -> None:
    """Else each rank of a Lightning training unpacks all of it on the GPU of the rank that kept it."""
    packer = Packer()
    node = packer.pack("it", torch.arange(3.0))
    node["device"] = "meta"  # a device that every machine has
    assert Unpacker(kept(packer.items)).unpack("it", node).is_meta
    assert torch.equal(Unpacker(kept(packer.items), on_cpu=True).unpack("it", node), torch.arange(3.0))


def test_two_keys_that_read_the_same_are_two_items() -> None:
    value = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    back = round_trip(value)
    assert back == {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}


def test_a_name_that_cannot_be_printed_is_kept_with_its_key() -> None:
    value = {"a\nb": torch.ones(1), "a\xa0b": torch.zeros(1), "\ud800": torch.ones(2)}
    packer = Packer()
    packer.pack("it", value)
    assert [item.name for item in packer.items] == ["it/a?b", "it/a?b~2", "it/?"]
    assert {key: each.tolist() for key, each in round_trip(value).items()} == {
        "a\nb": [1.0],
        "a\xa0b": [0.0],
        "\ud800": [1.0, 1.0],
    }


def test_a_very_long_name_is_cut_for_the_manifest() -> None:
    value = {"x" * 1000: torch.zeros(1), "x" * 1000 + "y": torch.ones(1)}
    assert round_trip(value) == value


# --- Plain values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**200),
        0.1,
        -0.0,
        5e-324,
        float("inf"),
        "tab\tand \u2028 and \ud800",
        b"\0\xff",
        (1, (2, [3, (4,)])),
        [0.1, -0.0, 1, True, None, "one"],
        [0.1, float("nan"), float("-inf"), 1],
        {"$": "float", "is": "no"},
        {1: "one", (2, 3): "pair", None: "none", False: "no"},
        [torch.bfloat16, torch.Size([2, 3]), torch.device("cuda:1")],
        {},
        [],
        (),
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    back = round_trip(value)
    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_a_long_list_of_numbers_is_its_own_json_and_is_not_shared() -> None:
    """A sampler may keep the order of millions of samples: packed one by one, training would wait for seconds."""
    order = list(range(1000))
    node = Packer().pack("order", order)
    assert node is order
    assert Unpacker({}).unpack("order", node) is not order


def test_dicts_keep_kind_and_order() -> None:
    value = [OrderedDict(b=1, a=2), Counter("abca"), {"b": 1, "a": 2}]
    back = round_trip(value)
    assert [type(part) for part in back] == [OrderedDict, Counter, dict]
    assert [list(part) for part in back] == [["b", "a"], ["a", "b", "c"], ["b", "a"]]


def test_numpy_values_come_back() -> None:
    value = {"a": np.arange(6, dtype=np.uint16).reshape(2, 3), "n": np.float64(0.1), "z": np.array(3), "b": np.bool_(1)}
    back = round_trip(value)
    assert back["a"].dtype == np.uint16
    assert (back["a"] == value["a"]).all()
    assert type(back["n"]) is np.float64
    assert back["n"] == value["n"]
    assert back["z"].shape == ()
    assert type(back["z"]) is np.ndarray
    assert type(back["b"]) is np.bool_


def loop() -> list[object]:
    inner: list[object] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        defaultdict(list),
        lambda: None,
        np.array([object()]),
        np.arange(3).astype(">i4"),
        np.float64,
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        loop(),
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_by_name(value: object) -> None:
    with pytest.raises(StateError, match=r"^state/deep/0(/0)*: .*(cannot be kept|no data|levels deep)"):
        Packer().pack("state", {"deep": [value]})


# --- A whole training ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, dropout, a running statistic, a buffer that no state_dict has."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.drop(self.norm(self.second(torch.relu(self.first(x))))) * (1 + 0.01 * torch.sin(self.seen))


class Training:
    """One model with one optimizer and schedule, every random number in use."""

    def __init__(self, make: Any = torch.optim.AdamW, schedule: Any = None, **options: Any) -> None:
        self.model = Net()
        self.optimizer = make(self.model.parameters(), lr=0.01, **options)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scheduler = schedule(self.optimizer) if schedule else cosine
        self.scaler = torch.amp.GradScaler("cpu")
        self.ema = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        self.notes: list[object] = []
        self.own = torch.Generator().manual_seed(random.randrange(1 << 30))
        self.numbers = np.random.default_rng(random.randrange(1 << 30))

    def state(self) -> TorchState:
        extra = {"notes": self.notes, "own": self.own, "numbers": self.numbers}
        return TorchState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            ema=self.ema,
            extra=extra,
        )

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            x = torch.randn(16, 8) + float(np.random.rand()) + random.random() + self.numbers.random()
            x += torch.rand(1, generator=self.own)
            loss = (self.model(x) - x.roll(1, 1)).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            else:
                self.scheduler.step()
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    self.ema[name].lerp_(param, 0.1)
            losses.append(loss.item().hex())
            self.notes.append(losses[-1])
        return losses

    def moments(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def bits(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values(), self.model.seen, *self.ema.values(), *self.moments()]
        return [bytes(bytes_of(tensor.detach().contiguous())) for tensor in tensors]


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name: str) -> None:
    """The same losses and the same bits as a training that was never interrupted, for each kind of optimizer state."""
    make, options = OPTIMIZERS[name]
    training = Training(make, **options)
    training.train(7)
    items = kept(training.state().items())
    expected = training.train(9)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    resumed = Training(make, **options)
    resumed.train(3)  # whatever happened before the load is forgotten
    notes = resumed.notes
    moments = [part.data_ptr() for part in resumed.moments()]
    resumed.state().load(items)
    assert [part.data_ptr() for part in resumed.moments()] == moments, "no second copy beside them"
    assert resumed.train(9) == expected
    assert resumed.bits() == training.bits()
    assert resumed.notes is notes
    assert notes == training.notes


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_parameters_that_do_not_lie_in_c_order_go_on_bit_for_bit(options: dict[str, Any]) -> None:
    """A fused optimizer takes moments that lie in another order than their parameter for other numbers, or refuses."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 2)).to(memory_format=torch.channels_last)
        model.turned = nn.Parameter(torch.randn(6, 4).t())
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            (model(torch.randn(2, 3, 8, 8)).square().mean() + model.turned.pow(3).sum()).backward()
            optimizer.step()

    model, optimizer = made()
    train(model, optimizer)
    saved = kept(TorchState(model=model, optimizer=optimizer).items())
    train(model, optimizer)
    resumed, other = made()
    TorchState(model=resumed, optimizer=other).load(saved)
    for param in resumed.parameters():
        assert other.state[param]["exp_avg"].stride() == param.stride()
    train(resumed, other)
    for mine, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach())


def test_a_learning_rate_that_is_a_tensor_stays_the_same_one() -> None:
    """A CUDA graph of the step reads it where it lay when the graph was recorded, and so do its later changes."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    state = TorchState(model=model, optimizer=optimizer)
    saved = kept(state.items())
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0.25)
    state.load(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_thousands_of_parameters_in_several_groups_go_on_bit_for_bit() -> None:
    """Their numbers are handed to torch as ranges, those of groups that do not count on as lists."""

    def made(seed: int) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2500)]
        groups = [{"params": params[:1200], "lr": 0.1}, {"params": params[1200:1203]}, {"params": params[1203:]}]
        return params, torch.optim.AdamW(groups, lr=0.01, foreach=True)

    def train(params: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        for number, param in enumerate(params):
            param.grad = param.detach() * number
        optimizer.step()

    params, optimizer = made(1)
    train(params, optimizer)
    saved = kept(TorchState(model=torch.nn.ParameterList(params), optimizer=optimizer).items())
    train(params, optimizer)
    resumed, other = made(2)
    TorchState(model=torch.nn.ParameterList(resumed), optimizer=other).load(saved)
    train(resumed, other)
    assert all(same_bits(mine.detach(), theirs.detach()) for mine, theirs in zip(resumed, params, strict=True))
    assert same_bits(other.state[resumed[2400]]["exp_avg_sq"], optimizer.state[params[2400]]["exp_avg_sq"])


lr = torch.optim.lr_scheduler
SCHEDULES = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.95**step),
    "multistep": lambda o: lr.MultiStepLR(o, [3, 9, 9, 12]),
    "onecycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=40),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.ExponentialLR(o, 0.9)], [8]),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 5, 2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on(name: str) -> None:
    training = Training(schedule=SCHEDULES[name])
    training.train(7)
    items = kept(training.state().items())
    expected = training.train(9)
    resumed = Training(schedule=SCHEDULES[name])
    resumed.state().load(items)
    assert resumed.train(9) == expected


def test_fp32_moments_of_bf16_weights_keep_their_bits() -> None:
    """Optimizer.load_state_dict casts to the dtype of the parameter; the master weights would be rounded."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    old = torch.optim.SGD([param], lr=0.1)
    rows = [torch.rand(4), torch.rand(2)]
    old.state[param] |= {"master": torch.rand(4), "deep": [rows, {"at": (rows[1], 1)}], "kind": "soap"}
    other = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    new = torch.optim.SGD([other], lr=0.1)
    carried(
        TorchState(model=nn.ParameterList([param]), optimizer=old),
        TorchState(model=nn.ParameterList([other]), optimizer=new),
    )
    assert same_bits(new.state[other]["master"], old.state[param]["master"])
    (one, two), deep = new.state[other]["deep"]
    assert same_bits(one, rows[0])
    assert same_bits(two, rows[1])
    assert deep == {"at": (two, 1)}, "torch makes a generator of a text, and casts deep inside, too"
    assert new.state[other]["kind"] == "soap"


def test_wrapped_and_bare_are_the_same_model() -> None:
    """A job that adds torch.compile must not lose its checkpoints."""
    one, other = Net(), Net()
    carried(TorchState(model=torch.compile(one, backend="eager")), TorchState(model=other))
    assert torch.equal(one.first.weight, other.first.weight)
    assert other.second.weight is other.first.weight


@pytest.mark.filterwarnings("ignore")
def test_one_layer_that_is_compiled_is_the_same_layer() -> None:
    def made(*, compiled: bool) -> tuple[nn.Module, TorchState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Late(), nn.Linear(1, 1)))
        layer = torch.compile(model[1], backend="eager")
        if compiled:
            model[1] = layer
        return model, TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()))

    for compiled in (False, True):
        (one, old), (other, new) = made(compiled=compiled), made(compiled=not compiled)
        one(torch.ones(3, 2))
        carried(old, new)
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert same_bits(mine.detach(), theirs.detach())
        late = other[1] if compiled else other[1]._orig_mod
        assert late[0].seen is not None


def test_a_job_may_begin_or_end_activation_checkpointing() -> None:
    """As after an out-of-memory error: the optimizer's parameters have longer names then, and are the same."""

    def made(*, wrapped: bool) -> tuple[nn.Module, TorchState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Late())
        if wrapped:
            apply_activation_checkpointing(model, check_fn=lambda part: part is not model)
        return model, TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()))

    for wrapped in (False, True):
        (one, old), (other, new) = made(wrapped=wrapped), made(wrapped=not wrapped)
        one(torch.randn(3, 2))
        carried(old, new)
        for (key, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert same_bits(mine, theirs), key
        assert [layer.seen is not None for layer in other.modules() if isinstance(layer, Late)] == [True]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_metric_of_which_nothing_is_kept_is_named(caplog: pytest.LogCaptureFixture, *, persistent: bool) -> None:
    """A metric of torchmetrics has an empty state_dict, until its persistent(True): a resume would begin it at 0."""

    def made() -> tuple[MeanMetric, TorchState]:
        metric = MeanMetric()
        metric.persistent(persistent)
        return metric, TorchState(model=nn.Linear(1, 1), extra={"mean": metric, "late": Late()})

    (one, old), (other, new) = made(), made()
    one.update(3.0)
    carried(old, new)
    assert bool(other.mean_value == one.mean_value) == persistent
    named = [record.getMessage() for record in caplog.records if "extra." in record.getMessage()]
    assert all(text.startswith("extra.mean: its state_dict() is empty") for text in named)
    assert len(named) == (0 if persistent else 2)


def test_what_accelerate_has_prepared_is_kept() -> None:
    """A loop of one's own with Accelerate needs no adapter: its optimizer and schedule are wrappers of torch's."""
    from accelerate import Accelerator

    def made() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        prepared = accelerator.prepare(model, optimizer, lr.ExponentialLR(optimizer, 0.9))
        return accelerator, *prepared

    def train(accelerator: Any, model: Any, optimizer: Any, schedule: Any) -> list[str]:
        losses = []
        for _ in range(5):
            loss = model(torch.randn(8, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses

    accelerator, model, optimizer, schedule = made()
    train(accelerator, model, optimizer, schedule)
    items = kept(TorchState(model=model, optimizer=optimizer, scheduler=schedule).items())
    kinds = json.loads(bytes(items[INDEX].data))["kinds"]
    assert kinds == {"optimizer": "AdamW", "scheduler": "ExponentialLR"}, "torch's, so that it loads without Accelerate"
    expected = train(accelerator, model, optimizer, schedule)
    accelerator, model, optimizer, schedule = made()
    TorchState(model=model, optimizer=optimizer, scheduler=schedule).load(items)
    assert train(accelerator, model, optimizer, schedule) == expected


def test_several_models_and_optimizers() -> None:
    """A GAN has two of each."""
    one, other = [nn.Linear(2, 2) for _ in range(2)], [nn.Linear(2, 2) for _ in range(2)]

    def state(models: list[nn.Linear]) -> TorchState:
        named = {"g": models[0], "d": models[1]}
        return TorchState(model=named, optimizer=[torch.optim.SGD(m.parameters()) for m in models])

    carried(state(one), state(other))
    assert torch.equal(one[1].weight, other[1].weight)


def test_a_cache_that_has_grown_is_taken_over() -> None:
    """Rotary tables and masks grow with the longest sequence seen; at the start they are small or not there."""
    one, other = Net(), Net()
    one.cache = torch.randn(9)
    other.cache = torch.randn(3)
    carried(TorchState(model=one), TorchState(model=other))
    assert torch.equal(one.cache, other.cache)
    assert "cache" not in other.state_dict()


class Extra(nn.Module):
    """Has state that is no tensor."""

    extra: object = None

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [
        {"seen": 3, "scale": torch.ones(1)},
        torch.arange(5),  # Transformer Engine returns one tensor, longer than that of a fresh module
        torch.empty(0),
    ],
)
def test_extra_state_of_a_module_comes_back(extra: object) -> None:
    one, other = (nn.Sequential(nn.Linear(1, 1), Extra(), nn.ParameterList([torch.empty(0)])) for _ in range(2))
    one[1].extra, other[1].extra = extra, torch.ones(2)
    carried(TorchState(model=one), TorchState(model=other))
    assert round_trip(other[1].extra) == extra if isinstance(extra, dict) else torch.equal(other[1].extra, extra)


class Lax(nn.Linear):
    """Keeps a plain value beside its parameters, and returns nothing when it is loaded."""

    seen = 0

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **options), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:  # type: ignore[override]
        self.seen = state.pop("seen")
        super().load_state_dict(state, strict)


class Strict(Lax):
    """Wants all of its state in any case."""

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)


class Nested(Strict):
    """Has its state in parts."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {"parts": [super().state_dict(*args, **options)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state["parts"][0])


class Bare(Nested):
    """Takes no options."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict()


@pytest.mark.parametrize("kind", [Lax, Strict, Nested, Bare])
def test_a_model_with_a_load_state_dict_of_its_own_comes_back(kind: type[Lax]) -> None:
    one, other = kind(3, 2), kind(3, 2)
    one.seen = 3
    carried(TorchState(model=one), TorchState(model=other))
    assert other.seen == 3
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach())


class Merged(nn.Module):
    """One parameter, which its state_dict has in three; copied: in memory of their own."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.merged = nn.Parameter(torch.randn(6, 2))

        def split(_: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
            for name, part in zip("qkv", state.pop(f"{prefix}merged").chunk(3), strict=True):
                state[prefix + name] = part.clone() if copied else part

        def merge(state: dict[str, Any], prefix: str, *_: object) -> None:
            if f"{prefix}q" in state:
                state[f"{prefix}merged"] = torch.cat([state.pop(prefix + name) for name in "qkv"])

        self._register_state_dict_hook(split)
        self._register_load_state_dict_pre_hook(merge)


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_hook_makes_of_a_parameter_goes_back_into_it(copied: bool) -> None:
    one, other = (nn.Sequential(Merged(copied=copied), nn.Linear(2, 2)) for _ in range(2))
    carried(TorchState(model=one), TorchState(model=other))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert same_bits(mine.detach(), theirs.detach())


def test_what_no_module_takes_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    one = nn.Linear(2, 2)
    one._register_state_dict_hook(lambda _, state, prefix, __: state.update({f"{prefix}version": 3}))
    carried(TorchState(model=one), TorchState(model=one))
    assert "model: its state_dict() has keys that its load_state_dict() leaves out: 1 (version ...)" in caplog.text


class Repeated(nn.Module):
    """Has one row for each of many heads, in one memory."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", torch.randn(2, 1, 4).expand(2, 8, 4), persistent=persistent)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_repeated_row_comes_back(persistent: bool) -> None:
    one, other = Repeated(persistent=persistent), Repeated(persistent=persistent)
    carried(TorchState(model=one), TorchState(model=other))
    assert same_bits(one.mask, other.mask)
    assert other.mask.stride() == (4, 0, 1)


def test_rows_that_differ_are_not_put_where_one_is_repeated() -> None:
    one, other = Repeated(persistent=False), Repeated(persistent=False)
    one.mask = torch.randn(2, 8, 4)
    carried(TorchState(model=one), TorchState(model=other))
    assert same_bits(one.mask, other.mask)
    one, other = Repeated(persistent=True), Repeated(persistent=True)
    one.mask = torch.randn(2, 8, 4)
    with pytest.raises(StateError, match=r"model/mask repeats one row here"):
        carried(TorchState(model=one), TorchState(model=other))


class Late(nn.Module):
    """Makes a buffer when it is first needed, and counts in it."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", None, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (torch.zeros(1) if self.seen is None else self.seen) + x.sum()
        return self.weight * self.seen


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_is_made_later_comes_back(*, persistent: bool) -> None:
    """Also one that the state_dict has once it is made: a program that begins again has not made it yet."""
    one, other = nn.Sequential(Late(persistent=persistent)), nn.Sequential(Late(persistent=persistent))
    one(torch.ones(3))
    carried(TorchState(model=one), TorchState(model=other))
    assert one(torch.ones(3)).item() == other(torch.ones(3)).item() == 6.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
def test_a_quantised_training_goes_on_though_its_observers_begin_empty() -> None:
    quantisation = pytest.importorskip("torch.ao.quantization")

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train()
        model.qconfig = quantisation.get_default_qat_qconfig("fbgemm")
        prepared: nn.Module = quantisation.prepare_qat(model)
        return prepared

    one, other = made(), made()
    one(torch.randn(3, 4))
    carried(TorchState(model=one), TorchState(model=other))
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert same_bits(mine, theirs)


def test_what_training_holds_by_other_names_is_filled_and_not_replaced() -> None:
    def made() -> tuple[nn.Module, dict[str, Any], TorchState]:
        model = nn.Linear(2, 2)
        flat = torch.randn(6)
        own: dict[str, Any] = {"flat": flat, "deep": [(flat[:2], {"free": [nn.Parameter(torch.randn(2))]})]}
        own["weight"] = model.weight
        return model, own, TorchState(model=model, extra={"own": own})

    _, one, old = made()
    model, other, new = made()
    flat, free = other["flat"], other["deep"][0][1]["free"][0]
    carried(old, new)
    assert other["flat"] is flat
    assert same_bits(flat, one["flat"])
    assert other["deep"][0][1]["free"][0] is free
    assert other["weight"] is model.weight
    assert other["deep"][0][0].data_ptr() == flat.data_ptr(), "it is still a part of the other one"


def test_a_list_within_a_dict_stays_the_list_that_training_adds_to() -> None:
    """Else a resumed training adds to one that is in no checkpoint any more."""

    def made() -> tuple[list[float], Counter[str], TorchState]:
        losses, seen = [1.0], Counter("a")
        own = {"history": [{"loss": losses}], "again": losses, "seen": seen}
        return losses, seen, state_of(nn.Linear(1, 1), extra={"own": own})

    losses, seen, old = made()
    losses += [2.0, 3.0]
    seen.update("ab")
    mine, counted, new = made()
    carried(old, new)
    assert (mine, counted) == (losses, seen)
    apart: dict[str, list[list[int]]] = {"x": [[1], [2]]}
    together: dict[str, list[list[int]]] = {"x": [[9]] * 2}
    carried(state_of(nn.Linear(1, 1), extra=apart), state_of(nn.Linear(1, 1), extra=together))
    assert together == apart


def test_what_is_one_only_here_does_not_get_the_bytes_of_two() -> None:
    one, other = {"a": torch.ones(2), "b": torch.zeros(2)}, dict.fromkeys("ab", torch.full((2,), 5.0))
    carried(state_of(nn.Linear(1, 1), extra={"x": one}), state_of(nn.Linear(1, 1), extra={"x": other}))
    assert [each.tolist() for each in other.values()] == [[1.0, 1.0], [0.0, 0.0]]
    untied, tied = (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    tied[1].weight = tied[0].weight
    with pytest.raises(StateError, match=r"model/0.weight and model/1.weight are one tensor here, and differ in the"):
        carried(TorchState(model=untied), TorchState(model=tied))
    untied[1].load_state_dict(untied[0].state_dict())
    carried(TorchState(model=untied), TorchState(model=tied))
    assert same_bits(tied[1].weight.detach(), untied[0].weight.detach())


def test_an_average_that_begins_as_the_weights_does_not_take_their_place() -> None:
    """It is apart from the first update on, and in a program that begins again it is the weights until restore()."""

    def made() -> tuple[nn.Module, dict[str, torch.Tensor], TorchState]:
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.randn(3), persistent=False)
        average = {key: each.detach() for key, each in (*model.named_parameters(), *model.named_buffers())}
        return model, average, TorchState(model=model, ema=average)

    one, average, old = made()
    for key, each in average.items():
        average[key] = 0.5 * each
    other, again, new = made()
    carried(old, new)
    for model, means in ((one, average), (other, again)):
        assert same_bits(model.seen, one.seen)
        assert same_bits(model.weight.detach(), one.weight.detach())
        assert all(same_bits(means[key], average[key]) for key in average)


def test_the_best_weights_of_a_module_that_is_given_after_them_come_back() -> None:
    def made() -> tuple[nn.Module, dict[str, Any], TorchState]:
        critic = nn.Linear(2, 2)
        best: dict[str, Any] = {"weights": critic.state_dict()}
        return critic, best, state_of(nn.Linear(1, 1), extra={"best": best, "critic": critic})

    one, best, old = made()
    best["weights"] = {key: each.clone() for key, each in best["weights"].items()}
    with torch.no_grad():
        one.weight.add_(1.0)
    other, again, new = made()
    carried(old, new)
    assert same_bits(other.weight.detach(), one.weight.detach())
    assert same_bits(again["weights"]["weight"], best["weights"]["weight"])


@pytest.mark.parametrize("made", [lambda: deque([1, 2], maxlen=2), lambda: array("d", [1, 2]), lambda: [1, 2]])
def test_what_acts_as_a_list_comes_back(made: Any) -> None:
    one, other = made(), made()
    one.append(7)
    carried(state_of(nn.Linear(1, 1), extra={"x": one}), state_of(nn.Linear(1, 1), extra={"x": other}))
    assert other == one


# --- Frozen parameters --------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A large frozen base with a small part that is trained, as LoRA makes it."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20)).requires_grad_(False)
        self.small = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.small(self.base(x))
        return result


def adapted(seed: int = 1, *, keep_frozen: bool = False) -> tuple[Adapted, Any, TorchState]:
    model = Adapted(seed)
    optimizer = torch.optim.AdamW(model.small.parameters())
    return model, optimizer, TorchState(model=model, optimizer=optimizer, keep_frozen=keep_frozen, random=False)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    torch.manual_seed(steps)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 20)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("keeps_now", [False, True])
@pytest.mark.parametrize("kept_then", [False, True])
def test_a_training_of_a_small_part_goes_on_without_the_frozen_one(kept_then: bool, keeps_now: bool) -> None:
    model, optimizer, state = adapted(keep_frozen=kept_then)
    train(model, optimizer, 3)
    items = kept(state.items())
    assert ("model/state/base.0.weight" in items) == kept_then
    assert "model/state/base.1.running_mean" in items, "no gradient reaches it, and it changes"
    expected = train(model, optimizer, 2)
    again, other, new = adapted(keep_frozen=keeps_now)
    new.load(items)
    assert train(again, other, 2) == expected


def test_a_run_that_kept_the_frozen_parameters_may_leave_them_out(caplog: pytest.LogCaptureFixture) -> None:
    """They are loaded once more, and are the same: that does not make them parameters that training has changed."""
    model, optimizer, state = adapted(keep_frozen=True)
    train(model, optimizer, 3)
    _, _, new = adapted()
    carried(state, new)
    assert "model/state/base.0.weight" not in kept(new.items())
    assert not caplog.records
    with torch.no_grad():
        model.base[0].weight.add_(1.0)
    again, _, new = adapted()
    carried(state, new)
    assert "model/state/base.0.weight" in kept(new.items())
    assert torch.equal(again.base[0].weight, model.base[0].weight)


def test_frozen_parameters_are_left_out_with_activation_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of the whole base, instead of the adapter's, takes a hundred times as long on battery."""

    def made() -> tuple[nn.Module, Any, TorchState]:
        model = Adapted()
        apply_activation_checkpointing(model.base)
        optimizer = torch.optim.AdamW(model.small.parameters())
        return model, optimizer, TorchState(model=model, optimizer=optimizer, keep_frozen=False, random=False)

    (model, optimizer, state), (again, other, new) = made(), made()
    train(model, optimizer, 3)
    items = kept(state.items())
    assert "model/state/small.weight" in items
    assert "model/state/base.0.weight" not in items
    expected = train(model, optimizer, 2)
    new.load(items)
    assert train(again, other, 2) == expected
    assert not caplog.records


def test_another_base_is_refused() -> None:
    model, optimizer, state = adapted()
    train(model, optimizer, 1)
    items = kept(state.items())
    again, _, new = adapted(seed=2)
    before = again.small.weight.clone()
    with pytest.raises(StateError, match=r"model was kept without 4 frozen parameters, and those here are others"):
        new.load(items)
    assert torch.equal(again.small.weight, before)


@pytest.mark.parametrize("trained", [False, True])
def test_what_was_frozen_and_is_changed_is_kept_from_then_on(trained: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, _, state = adapted()
    kept(state.items())
    if trained:
        model.base[0].weight.requires_grad_(True)
        kept(state.items())
        model.base[0].weight.requires_grad_(False)
    else:
        with torch.no_grad():
            model.base[0].weight.add_(1.0)
    for _ in range(2):
        items = kept(state.items())
        assert "model/state/base.0.weight" in items
        assert "model/state/base.0.bias" not in items
    assert "are changed or trained now, and are kept from now on: 1 (base.0.weight ...)" in caplog.text
    assert len(caplog.records) == 1
    again, _, new = adapted()
    new.load(items)
    assert torch.equal(again.base[0].weight, model.base[0].weight)


class Quantised(nn.Module):
    """Names the scale of its frozen weight after that one, and takes it back from nobody, as bitsandbytes does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False)
        self.small = nn.Parameter(torch.ones(2))
        self._register_state_dict_hook(
            lambda _, state, prefix, __: state.update({f"{prefix}weight.absmax": torch.ones(1)})
        )


def test_layers_that_training_had_unfrozen_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A program that unfreezes at step 1000 does not do so after a resume at step 1200: they would stay frozen."""

    def made() -> tuple[nn.Module, TorchState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(requires_grad=False)
        return model, TorchState(model=model)

    (one, old), (_, new) = made(), made()
    carried(old, new)
    assert not caplog.records
    one.requires_grad_()
    carried(old, new)
    (record,) = caplog.records
    assert "requires_grad of 2 parameters is not as it was" in record.getMessage()
    assert "(model/0.bias ...)" in record.getMessage()


def test_what_belongs_to_a_frozen_parameter_is_left_out_with_it(caplog: pytest.LogCaptureFixture) -> None:
    items = kept(TorchState(model=nn.Sequential(Quantised()), keep_frozen=False, random=False).items())
    assert set(items) == {INDEX, "model/state/0.small"}
    TorchState(model=nn.Sequential(Quantised()), keep_frozen=False, random=False).load(items)
    assert not caplog.records


# --- What does not fit --------------------------------------------------------------------------------------------


def state_of(model: nn.Module, **more: Any) -> TorchState:
    return TorchState(model=model, **more)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(2, 3), r"model/weight is float32\[2, 2\] in the checkpoint, float32\[3, 2\] here"),
        (nn.Linear(2, 2).bfloat16(), r"float32\[2, 2\] in the checkpoint, bfloat16\[2, 2\] here"),
        (nn.Linear(2, 2, bias=False), "model/bias is in the checkpoint and not in the model"),
        (nn.Bilinear(2, 2, 2), "model/weight is float32"),
        (nn.Sequential(nn.Linear(2, 2)), "model/0.weight is in the model and not in the checkpoint"),
    ],
    ids=["shape", "dtype", "fewer", "other", "names"],
)
def test_another_model_is_refused_and_untouched(model: nn.Module, expected: str) -> None:
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(StateError, match=expected):
        carried(state_of(nn.Linear(2, 2)), state_of(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


def stepped(make: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 3)
    optimizer = make(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("old", "new"),
    [("Adam", "SGD"), ("AdamW", "Adam"), ("SGD", "Adagrad"), ("AdamW", "Adagrad"), ("RMSprop", "Adam")],
)
def test_another_class_of_optimizer_is_refused(old: str, new: str) -> None:
    """Before anything is touched, and not with a KeyError of the next step."""
    model, optimizer = stepped(getattr(torch.optim, old))
    items = kept(TorchState(model=model, optimizer=optimizer).items())
    model, optimizer = stepped(getattr(torch.optim, new))
    before, drawn = [param.clone() for param in model.parameters()], torch.get_rng_state()
    with pytest.raises(StateError, match=rf"optimizer is {old} in the checkpoint, {new} here \(make it with {old}\)"):
        TorchState(model=model, optimizer=optimizer).load(items)
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)
    optimizer.step()


def test_a_checkpoint_without_classes_is_loaded() -> None:
    """An older release wrote none."""
    model, optimizer = stepped(torch.optim.AdamW)
    items = dict(kept(TorchState(model=model, optimizer=optimizer).items()))
    index = json.loads(bytes(items[INDEX].data))
    del index["kinds"]
    items[INDEX] = replace(items[INDEX], data=memoryview(json.dumps(index).encode()))
    again, other = stepped(torch.optim.AdamW)
    TorchState(model=again, optimizer=other).load(items)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_of_gpus_that_are_not_here_is_put_on_what_is_here(caplog: pytest.LogCaptureFixture) -> None:
    """A host comes back with fewer GPUs, or a job is given others: what a parameter has goes with it."""
    model, optimizer = stepped(torch.optim.AdamW)
    average = torch.randn(7)
    state = TorchState(model=model, optimizer=optimizer, extra={"run": {"average": average}})
    items, moved = from_device(kept(state.items()), "cuda:5", ("model", "optimizer", "extra.run"), generators=9)
    assert moved == 2 + 2 * 3 + 1, "parameters, two moments and a step of each, and the average"
    again, other = stepped(torch.optim.AdamW)
    run = {"average": torch.zeros(7)}
    TorchState(model=again, optimizer=other, extra={"run": run}).load(items)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) and two[key].device.type == "cpu" for key in one)
    assert torch.equal(run["average"].cpu(), average)
    assert f"the random numbers of 9 GPUs, and {torch.cuda.device_count()} are here" in caplog.text
    other.step()


def test_a_group_without_an_option_of_its_own_is_refused() -> None:
    """An option that a class adds in a newer torch is its own to fill in; one of the user's is not."""
    model, optimizer = stepped(torch.optim.AdamW)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    items = kept(TorchState(model=model, optimizer=optimizer).items())
    model, optimizer = stepped(torch.optim.AdamW)
    TorchState(model=model, optimizer=optimizer).load(items)
    optimizer.step()
    optimizer.param_groups[0]["lr_scale"] = 0.5
    with pytest.raises(StateError, match=r"parameter group 0 of optimizer has no lr_scale in the checkpoint"):
        TorchState(model=model, optimizer=optimizer).load(items)
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


def test_another_class_of_schedule_is_refused() -> None:
    """It would be loaded without a word, and go on with the other's figures."""
    schedules = torch.optim.lr_scheduler
    model, optimizer = stepped(torch.optim.SGD)
    old = TorchState(model=model, optimizer=optimizer, scheduler=schedules.CosineAnnealingLR(optimizer, 5))
    model, optimizer = stepped(torch.optim.SGD)
    new = TorchState(model=model, optimizer=optimizer, scheduler=schedules.StepLR(optimizer, 5))
    with pytest.raises(StateError, match=r"scheduler is CosineAnnealingLR in the checkpoint, StepLR here"):
        carried(old, new)


def test_another_optimizer_or_part_is_refused() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    one = state_of(model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(
        StateError, match=r"optimizer has parameter groups of \[2\] in the checkpoint, of \[1, 1\] here"
    ):
        carried(one, state_of(model, optimizer=torch.optim.SGD(groups)))
    with pytest.raises(StateError, match="optimizer is in the checkpoint and not given"):
        carried(one, state_of(model))
    with pytest.raises(StateError, match=r"extra\.a is given and not in the checkpoint"):
        carried(one, state_of(model, optimizer=torch.optim.SGD(model.parameters()), extra={"a": []}))
    with pytest.raises(StateError, match=r"extra\.a is a list in the checkpoint, a dict here"):
        carried(state_of(model, extra={"a": []}), state_of(model, extra={"a": {}}))


def test_what_is_no_state_is_refused_at_once() -> None:
    """At the start, not in the emergency."""
    with pytest.raises(StateError, match=r"^sampler: a int has no state_dict"):
        TorchState(model=nn.Linear(1, 1), sampler=3)
    with pytest.raises(StateError, match=r"^extra\.best: a float has no .* \(give the dict or list in which training"):
        TorchState(model=nn.Linear(1, 1), extra={"best": 0.5})


def test_what_an_optimizer_trains_and_no_part_has_is_refused() -> None:
    """A loss has parameters of its own, and a list of layers is no module: a resume would lose them silently."""
    model, loss, late = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    stale = nn.Parameter(torch.ones(3))  # as of a layer that was replaced, or tied, after the optimizer was made
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters(), late, stale])

    def step() -> None:
        loss(model(torch.ones(1, 2)) * late).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for extra, shape in (({}, r"\[1, 2\]"), ({"loss": loss}, r"\[2\]")):
        with pytest.raises(StateError, match=rf"^optimizer trains a parameter of shape {shape} that no module"):
            state_of(model, optimizer=optimizer, extra=extra).items()
    assert state_of(model, optimizer=optimizer, extra={"loss": loss, "late": [late]}).items()


def test_a_layer_that_is_removed_in_the_course_of_training_fails_no_emergency(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer still has it, with its moments: it is named once, and all else is saved."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert state.items()
    del model[1]
    for _ in range(2):
        assert state.items()
    (record,) = caplog.records
    assert "a parameter of shape [2, 2] that no module here has" in record.getMessage()
    with pytest.raises(StateError, match="that no module here has"):
        state_of(model, optimizer=optimizer).items()


class Ascending(torch.optim.SGD):
    """Steps by another optimizer within it, as SAM does."""

    def __init__(self, params: Any, *, keeps: bool) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.within = torch.optim.SGD(self.param_groups)
        self.keeps = keeps

    def step(self, closure: Any = None) -> Any:
        return self.within.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"within": self.within.state_dict()} if self.keeps else {})


def test_the_momentum_of_an_optimizer_within_another_is_not_lost() -> None:
    model = nn.Linear(2, 2)
    optimizer = Ascending(model.parameters(), keeps=False)
    state = state_of(model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    assert state.items()
    optimizer.step()
    with pytest.raises(StateError, match=r"^optimizer\.within: its state is not in optimizer\.state_dict"):
        state.items()
    optimizer.keeps = True
    assert state.items()


def test_a_lazy_parameter_is_named_until_it_has_a_shape() -> None:
    """The first forward pass gives it one; the state may be made before."""
    model = nn.Sequential(nn.LazyLinear(3))
    state = TorchState(model=model)
    for use in (lambda: list(state.items()), lambda: state.load(kept(TorchState(model=nn.Linear(2, 3)).items()))):
        with pytest.raises(StateError, match=r"^model/0\.weight has no shape yet \(run the model once before restore"):
            use()
    model(torch.ones(1, 2))
    assert list(state.items())


def test_a_group_that_names_no_backend_divides_where_there_is_no_gpu(tmp_path: Path) -> None:
    """torch then takes gloo on a host without a GPU, and gives the backend's name as "undefined"."""
    distributed.init_process_group(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.Linear(64, 64)
        state = TorchState(model=model, divide=True)
        items = kept(state.items())
        expected = model.weight.detach().clone()
        nn.init.zeros_(model.weight)
        state.load(items)
        assert torch.equal(model.weight, expected)
    finally:
        distributed.destroy_process_group()


def test_a_rank_without_a_row_of_a_parameter_gets_moments_and_not_the_parameter(tmp_path: Path) -> None:
    """FSDP2 gives the rows of a small parameter to the first ranks: an empty shard of another lies nowhere."""
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)

    def made() -> tuple[nn.Parameter, Any, TorchState]:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Module()
        model.empty = nn.Parameter(distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        return model.empty, optimizer, TorchState(model=model, optimizer=optimizer)

    try:
        (param, optimizer, old), (again, other, new) = made(), made()
        optimizer.state[param]["momentum_buffer"] = param.detach().clone()
        carried(old, new)
        moment = other.state[again]["momentum_buffer"]
        assert moment is not again
        assert (moment.shape, moment.placements, moment.requires_grad) == (again.shape, again.placements, False)
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, while it is imported
def test_an_optimizer_whose_state_one_rank_alone_can_have_is_refused_at_once(tmp_path: Path) -> None:
    """Every save would fail, with the advice to gather the state first: then it fails on the other ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(StateError, match=r"^optimizer: a ZeroRedundancyOptimizer gives its state to one rank"):
            TorchState(model=model, optimizer=optimizer)
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP|`NO_SHARD`|The following")
@pytest.mark.parametrize("within", [False, True], ids=["the model", "a part of it"])
def test_fsdp1_is_refused_at_once(tmp_path: Path, *, within: bool) -> None:
    """Its state_dict() is a collective, and gathers the whole model on each GPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(StateError, match=r"FSDP1\) hides its shards: use FSDP2"):
            TorchState(model=nn.Sequential(sharded) if within else sharded)
    finally:
        distributed.destroy_process_group()


def test_nobody_to_divide_with() -> None:
    with pytest.raises(StateError, match=r"torch\.distributed is not initialised"):
        TorchState(model=nn.Linear(1, 1), divide=True)


@pytest.mark.parametrize(
    "index",
    [
        None,
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"format": 2, "parts": {}}',
        b'{"format": 1}',
        b'{"format": 1, "parts": 3}',
    ],
    ids=lambda index: repr(index)[:20],
)
def test_another_writers_checkpoint_is_refused(index: bytes | None) -> None:
    items = {} if index is None else {INDEX: Loaded(INDEX, "json", (), memoryview(index))}
    with pytest.raises(StateError, match="not written by TorchState"):
        state_of(nn.Linear(1, 1)).load(items)


@pytest.mark.parametrize(
    "parts",
    [
        {"model": 3},
        {"model": {}},
        {"model": {"state": {"weight": 3, "bias": 3}, "buffers": {}}},
        {"model": {"state": {"weight": {"$": "tensor", "item": "none"}, "bias": 3}, "buffers": {}}},
        {"model": {"state": {"$": "dict", "of": 3}, "buffers": {}}},
    ],
    ids=str,
)
def test_an_index_that_does_not_hold_together_is_refused(parts: object) -> None:
    """Made by somebody, since a damaged one does not get here: no error but ours, and nothing is touched."""
    index = json.dumps({"format": 1, "parts": parts}).encode()
    model = nn.Linear(1, 1)
    before = model.weight.item()
    with pytest.raises(StateError):
        TorchState(model=model, random=False).load({INDEX: Loaded(INDEX, "json", (), memoryview(index))})
    assert model.weight.item() == before


def test_a_checkpoint_that_lacks_a_tensor_is_refused() -> None:
    """The store would not let it through; should one ever come, it says so and touches nothing."""
    items = dict(kept(state_of(nn.Linear(1, 1)).items()))
    del items["model/state/weight"]
    with pytest.raises(StateError, match="model/state/weight is missing"):
        state_of(nn.Linear(1, 1)).load(items)


def test_a_model_without_memory_is_refused() -> None:
    """Nothing would be loaded, and nothing said."""
    with torch.device("meta"):
        other = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"model/weight is on the meta device here \(give it memory before"):
        carried(TorchState(model=nn.Linear(2, 2)), TorchState(model=other))


@pytest.mark.parametrize("parts", [1, 100], ids=["few", "many"])
def test_a_parameter_whose_memory_was_freed_is_refused(parts: int) -> None:
    """Programs that shard by hand do this between two uses; to copy or load it would end the process with a SIGSEGV."""
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(parts))
    state = TorchState(model=model)
    list(state.items())
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"^model/state/0\.weight: the memory of this tensor has been freed"):
        list(state.items())
    whole = TorchState(model=nn.ModuleList(nn.Linear(64, 64) for _ in range(parts)))
    with pytest.raises(StateError, match=r"model/0\.weight has no memory here: it was freed \(gather it before rest"):
        carried(whole, state)


def test_parameters_in_another_order_are_refused() -> None:
    """An optimizer's state names them by number; a set of them has another order in each process."""

    def made(order: list[int]) -> TorchState:
        model = nn.ParameterList([torch.ones(2) for _ in range(3)])
        return TorchState(model=model, optimizer=torch.optim.Adam([model[number] for number in order]))

    carried(made([0, 1, 2]), made([0, 1, 2]))
    with pytest.raises(StateError, match=r"optimizer had other parameters of the model, or another order \(sort them"):
        carried(made([0, 1, 2]), made([0, 2, 1]))


def test_what_is_half_loaded_is_said() -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise IndexError(state["there"])

    pattern = (
        r"^sampler: was not put back \(KeyError: 'there'\); what comes before it has been \(make all objects again"
    )
    model = nn.Linear(1, 1)
    with pytest.raises(StateError, match=pattern):
        carried(TorchState(model=model, sampler=Other()), TorchState(model=model, sampler=Refusing()))


class Other:
    def state_dict(self) -> dict[str, int]:
        return {"here": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass

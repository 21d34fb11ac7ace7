"""Strategies: which programs there are. Only what DDP does without complaint, in the order in which scripts do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.live.programs.comparison import SERVED_WAYS, WAYS
from tests.live.programs.models import MODELS, OPTIMIZERS, SERVED, TAKES_ROOTS
from tests.live.programs.program import WHICH, Program, matches
from tests.live.unasked import COLLECTIVE, UNASKED

ZEROING = ("", "in_place", "model", "model_in_place", "by_hand", "data", "detached")


def _lines(name: str, *choices: Iterable[str]) -> list[str]:
    """Every combination, each without the words that are empty."""
    return [" ".join(word for word in (name, *words) if word) for words in product(*choices)]


GRADIENTS = {
    "norm": ["norm"],
    "clip": ["clip 0.1", "clip 100"],
    "clip_value": ["clip_value 0.01"],
    "adaptive_clip": ["adaptive_clip"],
    "scale": _lines(
        "scale",
        ("mul", "operator", "foreach", "data", "detached", "view", "replace", "replace_data", "copy", "set", "numpy", "out"),
        ("all", "odd"),
    ),
    "drop": _lines("drop", WHICH[1:]),
    "make": _lines("make", WHICH),
    "swap_gradients": ["swap_gradients"],
    "flat": ["flat"],
    "flat_views": ["flat_views"],
    "scale_flat_buffers": ["scale_flat_buffers"],
}
"""For between backward and step; now and then elsewhere."""

BETWEEN = {
    "see": _lines(
        "see", ("model", "optimizer", "parameters", "data", "norms", "numpy", "vector", "gradients", "buffers"), ("", "@0")
    ),
    "keep": _lines(
        "keep",
        (
            *("gradients", "gradient_data", "gradient_views", "parameter_data", "parameter_views", "parameter_numpy"),
            *("state", "state_dict", "optimizer_state_dict"),
        ),
    ),
    "save": _lines("save", ("state_dict", "optimizer", "module", "pickle"), ("", "@0")),
    "duplicate": _lines("duplicate", ("model", "both", "optimizers", "half"), ("", "@1")),
    "mark": ["mark"],
    "rollback": ["rollback model optimizer", "rollback optimizer model", "rollback model", "rollback optimizer"],
    "average": _lines("average", ("lerp", "data", "state_dict", "swa")),
    "evaluate_average": _lines("evaluate_average", ("copy", "exchange")),
    "write": [
        *_lines(
            "write",
            ("vector", "foreach", "data", "new_data", "numpy", "init", "load", "mul", "operator", "copy", "out"),
            ("all", "first", "odd"),
        ),
        *("write mul all @1", "write data odd @0"),
    ],
    "freeze": ["freeze first", "freeze last", "freeze odd"],
    "unfreeze": ["unfreeze"],
    "layout": ["layout channels_last"],
    "prune": ["prune mask", "prune remove"],
    "apply": _lines("apply", ("modules", "tensors", "to", "shared", "buffers_alone")),
    "represent": _lines("represent", ("trace", "functional", "shallow", "loaded", "stacked", "fused"), ("", "@1")),
    "distributed_state": _lines("distributed_state", ("get", "set", "full", "optimizer")),
    "buffer": _lines("buffer", ("data", "zero", "add"), ("", "@0", "@1")),
    "state": _lines("state", ("read", "clear", "new", "pop", "replace", "zero", "scale")),
    "rate": ["rate 0.5", "rate 1.5"],
    "option": ["option momentum 0.5", "option weight_decay 0.05"],
    "add_group": ["add_group"],
    "regroup": ["regroup"],
    "schedule": ["schedule"],
    "evaluate": _lines("evaluate", ("no_grad", "inference_mode", "enable_grad")),
    "evaluate_on_one_rank": _lines("evaluate", ("no_grad", "inference_mode"), ("@0", "@1")),
    "forward": ["forward"],
    "mode": _lines("mode", ("train", "eval", "part")),
    "flat_buffers": ["flat_buffers"],
    "zero_flat_buffers": ["zero_flat_buffers"],
    "look": ["look"],
    "thread": _lines("thread", ("parameters", "backwards", "state", "save"), ("", "@0", "@1")),
    "fork": _lines("fork", ("parameters", "state"), ("", "@1")),
    "interrupt": _lines("interrupt", ("save", "read"), ("", "@0")),
    "functorch": _lines("functorch", ("vmap", "closed", "grad", "jvp", "functionalize"), ("", "@1")),
    "scripted": _lines("scripted", ("alone", "listed"), ("", "@1")),
    "unasked": _lines("unasked", sorted(UNASKED.keys() - COLLECTIVE), ("", "@1")),
    "stumble": _lines("stumble", ("forward", "forward_end", "loss", "backward", "step_pre", "step_post")),
    "stumble_on_one_rank": _lines("stumble", ("step_pre", "step_post"), ("@0", "@1")),
    "metric": ["metric"],
    "barrier": ["barrier"],
    "zero_grad": _lines("zero_grad", ZEROING),
}
"""For between steps, and now and then anywhere else between the passes of one."""

HOOKS = {
    "step_pre": _lines("step_pre", ("clip", "scale", "replace", "decay", "rate", "norm", "keep")),
    "unbound_step_pre": _lines("unbound_step_pre", ("clip", "scale", "norm", "keep")),
    "global_step_pre": _lines("global_step_pre", ("clip", "scale", "norm", "keep")),
    "step_post": _lines("step_post", ("clamp", "renorm", "average", "count", "see", "gradients", "state", "zero_grad")),
    "gradient": _lines("gradient", ("scale", "see")),
    "accumulated": _lines("accumulated", ("scale", "replace", "see")),
    "forward_pre": _lines("forward_pre", ("clamp", "data", "norms")),
    "backward_post": ["backward_post see"],
    "backward_pre": _lines("backward_pre", ("see", "scale")),
    "forward_post": _lines("forward_post", ("see", "scale", "clamp")),
    "child_pre": _lines("child_pre", ("clamp", "data", "norms")),
    "several_gradients": ["several_gradients see"],
    "node": _lines("node", ("see", "scale")),
    "scheduler": _lines("scheduler", ("step", "cycle", "warmup")),
}

CASTS = _lines("cast", ("half", "double", "bfloat16"), ("", "through"))
"""At the very end only: DDP's hooks are lost where a parameter has been of another dtype, and it sums no more."""

FLAGS = (
    *("twice", "weighted", "penalty", "slope", "functional", "zeroed_between", "autocast", "eval", "infinite"),
    *("anomaly", "elsewhere", "counted", "inputs", "graph", "evaluated_inside", "inner", "retained"),
    *("recomputed", "reentrant"),
)
WRAPPED = ("each",)
"""Flags for wrapped models only: an attached one is summed in both passes, where DDP sums the first."""
STEPS_UNDER = _lines("step_under", ("autocast", "no_kernels_of_oneDNN", "float64_by_default", "deterministic_algorithms"))
METHODS = ("surgery references", "surgery clones", "sam")
KEPT_PARTS = "kept parts"
"""Leaves out gradients of an earlier pass that are still there in a pass which does not use their parameters."""

NOT_WITH_NO_SYNC = ("forward", "evaluate enable_grad")
"""A forward pass with gradients and without a backward pass has DDP sum in the next backward pass, be it inside no_sync."""


# -- where the update is on the servers ------------------------------------------------------------------------

AS_SERVED = (
    # .grad has the rank's own gradient there, not the average
    *("norm", "clip 0.1", "clip 100", "flat", "scale_flat_buffers", "see gradients", "surgery", "scaled", "infinite"),
    *("keep gradients", "keep gradient_data", "keep gradient_views", "step_post gradients", "apply tensors"),
    *(f"{hook} {what}" for hook in ("step_pre", "unbound_step_pre", "global_step_pre") for what in ("norm", "keep")),
    # sums of averages are rounded otherwise than averages of sums
    "no zero_grad",
    # writes that torch does not count: docs/asynchronous.md says that they are lost
    *("write data", "write new_data", "write numpy", "write load", "write vector", "scale data", "scale numpy"),
    *("forward_pre data", "child_pre data", "step_post renorm"),
    # what is fetched of the optimizer's state is a copy, of no use once the next backward pass has begun
    *("keep state", "keep optimizer_state_dict", "thread state"),
    # the mask gets into the weight by its data, as those
    "prune remove",
    # not in float32; written to by each forward pass
    *("model mixed", "model odd", "model renormed"),
)
"""What programs go without whose update is on the servers, since it is not to be compared there."""

MIDWAY = "midway"
"""Leaves out what changes the optimizer's options or needs its state, between a backward pass and the step."""

TOO_LATE = (
    *GRADIENTS,
    *(f"state {how}" for how in ("clear", "new", "pop", "replace", "zero", "scale")),
    *("flat_buffers", "sam", "no step", "step twice", "step 0", "step 1", "no_sync_backward", "summed twice", "no sum"),
    *("write", "step_pre", "unbound_step_pre", "global_step_pre", "step_post clamp", "step_post state"),
    *("forward_pre clamp", "child_pre clamp", "rollback", "option", "stumble step_pre", "stumble step_post"),
    MIDWAY,
)
"""What is mostly refused there. Few programs have any of it: most get to their end."""

NOT_WITH_NO_SYNC_AS_SERVED = ("stumble loss", "stumble backward")
"""As `NOT_WITH_NO_SYNC`: the pass inside no_sync is summed, and a second one is refused."""

OF_STATE = (
    *(
        "see optimizer",
        "save state_dict",
        "save optimizer",
        "save module",
        "duplicate both",
        "duplicate optimizers",
        "mark",
        "state read",
    ),
    *("distributed_state optimizer", "interrupt save", "fork state"),
)
"""What needs the optimizer's state, which is fetched before."""

REATTACH = [
    *("reattach", "reattach rollback model optimizer", "reattach option momentum 0.5", "reattach write mul all"),
    *("reattach write data odd", "reattach write new_data all"),
    *(f"reattach state {how}" for how in ("clear", "pop", "replace", "scale")),
]
"""What servers are told by closing a session and attaching again."""

OF_OPTIONS = ("rate", "schedule", "fetch_state", "reattach")
"""What comes between a step and the next backward pass."""

NOISY = (
    *("convolutions", "channels_last", "static_convolutions", "convolutions_of_unequal_buffers", "attention", "static"),
    *("normed_branches", "normed_towers"),
)
"""Some of their gradients are zero but for rounding (of a bias ahead of BatchNorm), which Adam's updates do not show."""


def parts_of(model: str) -> list[str]:
    """What may stand in `backward`: parts that both ranks use, or one and the other."""
    parts = MODELS[model].parts
    if not parts:
        return [""]
    first, second = parts
    both = f"{first},{second}"
    alike = [both, first, second] + ([] if MODELS[model].must_take else ["none"])
    if MODELS[model].are_models:
        return alike
    return alike + [f"{one}|{other}" for one, other in product(alike, alike) if one != other]


class _Choices:
    """What is left when everything that matches one of `without` is left out."""

    def __init__(self, draw: Callable[[Any], Any], without: Sequence[str]) -> None:
        self.draw, self._without = draw, tuple(without)

    def allowed(self, items: Iterable[str], prefix: str = "") -> list[str]:
        return [item for item in items if not any(matches(prefix + item, words) for words in self._without)]

    def of(self, items: Sequence[str], prefix: str = "") -> str:
        return self.draw(st.sampled_from(self.allowed(items, prefix)))  # type: ignore[no-any-return]

    def table(self, named: dict[str, list[str]]) -> dict[str, list[str]]:
        return {name: left for name, lines in named.items() if (left := self.allowed(lines))}

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent  # type: ignore[no-any-return]


# shrinking is the command's, which knows programs
GENERATED = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
"""Settings of hypothesis for tests and commands that run `programs`."""


@st.composite
def programs(draw: Any, without: Sequence[str] = (), served: bool = False) -> Program:
    """A program of which nothing matches one of `without`. It uses a few kinds of unusual actions, several times each: with one
    of everything, the first defect would hide all others.

    served: its update is on the servers.
    """
    may_skip = draw(st.booleans())
    if served:
        without = [*without, *AS_SERVED]
        if draw(st.integers(0, 99)) < 85:
            without += [*TOO_LATE, *(NOT_WITH_NO_SYNC_AS_SERVED if may_skip else ())]
    choices = _Choices(
        draw, [*without, *(NOT_WITH_NO_SYNC if may_skip else ("no_sync", "no_sync_backward", "no_sync_forward"))]
    )
    model = choices.of([*MODELS], "model ")
    gradients, between = choices.table(GRADIENTS), choices.table(BETWEEN)
    if served:
        between.pop("zero_grad")
        between["fetch_state"] = ["fetch_state"]
        if MIDWAY in without and not _has_buffers(model):  # buffers become those of rank 0 at once; under DDP in a forward pass
            between["reattach"] = REATTACH
    if _has_buffers(model):
        between.pop("evaluate_on_one_rank", None)  # DDP's broadcast of buffers would wait for the other rank
        between.pop("represent", None)  # it calls the module, which is a forward pass of an attached model
        if "buffer" in without:
            between.pop("rollback", None)
    if "convolutions" in model:
        between.pop("layout", None)  # DDP sums wrongly where the strides of parameters have changed since it was made
    if KEPT_PARTS in without:
        between.pop("freeze", None)
    if MODELS[model].parts:  # DDP refuses to sum what a pass in no_sync made and a later one does not, if it is gone meanwhile
        for name in ("zero_grad", "drop", "freeze"):
            between.pop(name, None)
            gradients.pop(name, None)
    kinds = draw(st.lists(st.sampled_from([*gradients, *between]), max_size=4, unique=True))
    for first, second in (("keep", "look"), ("flat_buffers", "scale_flat_buffers"), ("flat_buffers", "zero_flat_buffers")):
        if first in kinds and second in {**gradients, **between} and second not in kinds:
            kinds.append(second)
    hooks = []
    if choices.chance(25):
        for name in draw(st.lists(st.sampled_from([*choices.table(HOOKS)]), min_size=1, max_size=2, unique=True)):
            if name in ("backward_post", "backward_pre") and MODELS[model].are_models:
                continue  # torch notes on the module that it has one, and not on its other form
            lines = choices.allowed(_lines("", ("before", "after"), choices.allowed(HOOKS[name])))
            hooks += [choices.of(lines)] if lines else []
    writes_in_forward = model == "renormed" or any(hook.split()[1] == "forward_pre" for hook in hooks)
    if writes_in_forward and "thread" in kinds:
        kinds.remove("thread")  # under DDP, too, it would read what the forward pass writes
    if any(hook.split()[1] == "scheduler" for hook in hooks) and "schedule" not in kinds and "schedule" in between:
        kinds.append("schedule")
    way = choices.of(SERVED_WAYS if served else WAYS, "way ")
    if "wrapped" in way and "stumble_on_one_rank" in kinds:
        kinds.remove("stumble_on_one_rank")  # the drop-in waits in the first step() for the other rank's
    style = _Style(choices, model, is_wrapped="wrapped" in way)
    steps = [_step(choices, style, kinds, {**between, **gradients}, gradients) for _ in range(draw(st.integers(4, 9)))]
    if choices.allowed(CASTS) and choices.chance(3):
        steps[-1] = (*steps[-1], choices.of(CASTS))
    if served:
        steps = [tuple(line for each in step for line in _with_state(choices, each)) for step in steps]
    return Program(tuple(steps), model, choices.of(_optimizers(model, style, served), "optimizer "), way, tuple(hooks))


def _with_state(choices: _Choices, line: str) -> tuple[str, ...]:
    """An action, behind one that fetches the optimizer's state if it needs that."""
    needs = any(matches(line, words) for words in OF_STATE)
    return ("fetch_state", line) if needs and choices.chance(95) else (line,)


def _optimizers(model: str, style: _Style, served: bool) -> list[str]:
    if not served:
        return [name for name in OPTIMIZERS if style.may_keep or name != "part"]
    known = [name for name in SERVED if model not in NOISY or name not in TAKES_ROOTS]
    return [name for name in known if name.startswith("two") == MODELS[model].are_models]  # one for each session there


@cache
def _has_buffers(model: str) -> bool:
    return any(True for _ in MODELS[model].make().buffers())


class _Style:
    """What most steps of a program have in common."""

    def __init__(self, choices: _Choices, model: str, is_wrapped: bool) -> None:
        is_static = "static_graph" in MODELS[model].ddp
        self.may_go_past = is_wrapped and not is_static  # DDP sums no more where its first pass was past it
        self.is_wrapped = is_wrapped
        self.zeroing = _zeroing(choices, 30)
        flags = choices.allowed((*FLAGS, *(WRAPPED if is_wrapped else ())))
        if MODELS[model].parts:  # DDP refuses a penalty on what the forward pass did not use
            flags = [flag for flag in flags if flag not in ("penalty", "functional")]
        elif is_static:  # where the first backward pass makes no gradient of a parameter, DDP does not sum the next
            flags = [flag for flag in flags if flag != "slope"]
        self.flag = choices.of(flags) if flags and choices.chance(25) else ""
        self.all_parts = parts_of(model)
        if MODELS[model].are_models and not choices.allowed(["step 0"]):
            self.all_parts = self.all_parts[:1]  # a model without a backward pass has none to step with
        self.parts = choices.of(self.all_parts) if not choices.chance(50) else None
        self.several = choices.chance(25)
        self.has_parts = bool(MODELS[model].parts)
        # percent inside no_sync: of all passes but the last of a step, and of that
        self.accumulates = 75 if choices.allowed(["summed twice"]) else 100
        self.skips_sums = 4 if not self.has_parts and choices.allowed(["no sum"]) else 0
        self.may_keep = not self.has_parts or bool(choices.allowed([KEPT_PARTS]))
        if not self.may_keep:
            self.zeroing, self.several = "zero_grad", False
        self.step = "step"
        self.uneven = self.several and not _has_buffers(model) and choices.chance(20)
        if choices.allowed(["scaled"]) and choices.chance(6):
            self.flag, self.step = "scaled", choices.of(["scaled_step", "scaled_step unscaled"])
        elif self.flag == "infinite":
            self.step, self.several = "step_if_finite", False
        elif choices.allowed(["closure"]) and choices.chance(3):
            self.step = "closure"
        elif choices.allowed(STEPS_UNDER) and choices.chance(6):
            self.step = choices.of(choices.allowed(STEPS_UNDER))


def _step(
    choices: _Choices, style: _Style, kinds: list[str], actions: dict[str, list[str]], gradients: dict[str, list[str]]
) -> tuple[str, ...]:
    parts = choices.of(style.all_parts) if style.parts is None else style.parts
    if style.step == "closure" and choices.chance(70):
        step = [f"closure {parts}".strip()]
    else:
        zeroing = style.zeroing if choices.chance(85) or not style.may_keep else _zeroing(choices, 60)
        step = [zeroing] if zeroing else []
        step += _passes(choices, parts, style)
        if not choices.chance(8) or not choices.allowed(["no step"]):
            step.append("step" if style.step == "closure" else style.step)
    for kind in kinds:
        if choices.chance(45):
            place = _place(choices, step, kind in gradients)
            # what is too late in a session is not between two of them
            line = choices.draw(st.sampled_from(REATTACH)) if kind == "reattach" else choices.of(actions[kind])
            needs_step = not choices.allowed([MIDWAY]) and any(matches(line, words) for words in (*OF_STATE, *OF_OPTIONS))
            step.insert(len(step) if needs_step else place, line)
    if choices.chance(8) and "step" in step and choices.allowed(["step 0", "step 1"]):
        step[step.index("step")] = choices.of(choices.allowed(["step 0", "step 1"]))
    if choices.chance(4) and "step" in step and choices.allowed(["step twice"]):
        step.insert(step.index("step") + 1, "step")
    return tuple(step)


def _zeroing(choices: _Choices, unusual: int) -> str:
    if not choices.chance(unusual):
        return "zero_grad"
    return choices.of([*choices.allowed(_lines("zero_grad", ZEROING)), *choices.allowed(["no zero_grad"])]).replace(
        "no zero_grad", ""
    )


def _passes(choices: _Choices, parts: str, style: _Style) -> list[str]:
    """The passes of one step; where there are several, all but the last are usually inside no_sync."""
    methods = choices.allowed(METHODS)
    if methods and not style.step.startswith("scaled") and choices.chance(4):
        return [f"{choices.of(methods)} {parts}".strip()]
    count = choices.draw(st.integers(1, 3)) if style.several else 1
    found = []
    for index in range(count):
        words = ["backward", parts]
        last = index == count - 1
        if choices.allowed(["no_sync"]) and choices.chance(style.skips_sums if last else style.accumulates):
            ways = ["no_sync"] * 10 + choices.allowed(["no_sync_backward", "no_sync_forward"])
            words.append(choices.of(ways))
        if (style.is_wrapped or words[-1] == "no_sync") and choices.allowed(["again"]) and choices.chance(5):
            words.append("again")
        # the drop-in waits in the first step() for the other rank's: one rank alone must not leave out a step
        if style.may_go_past and style.flag != "infinite" and choices.allowed(["past"]) and choices.chance(5):
            words.append("past")
        if style.flag == "scaled" or (style.flag and choices.chance(70)):
            words.append(style.flag)
        if style.flag == "scaled":
            words.append("autocast")
        if words[-1] == "infinite":
            words[-1] = "weighted|infinite"
        line = " ".join(word for word in words if word)
        found += [line] if not (style.uneven and "no_sync" in words) else [f"{line} @{choices.draw(st.integers(0, 1))}"]
    return found


def _place(choices: _Choices, step: list[str], of_gradients: bool) -> int:
    """Where in `step` an action goes: its usual place, or, one time in five, any."""
    if choices.chance(20):
        return choices.draw(st.integers(0, len(step)))  # type: ignore[no-any-return]
    if not of_gradients:
        return len(step)
    steps = [index for index, line in enumerate(step) if line.startswith(("step", "scaled_step"))]
    return steps[0] if steps else len(step)

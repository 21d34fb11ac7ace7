"""ParameterGroups: converts the parameter groups of torch's optimizers to update rules of the
servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradlane.errors import InputError, UnsupportedError
from gradlane.live.session import outdated
from gradlane.live.session.guarded_states import own_class
from gradlane.transport import Adam, Rule, Sgd

_REFUSED = {"amsgrad": "keeps a third state", "capturable": "is for devices", "differentiable": "needs the update's graph here"}
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_NOTHING = Sgd(lr=0.0)  # of a group without trained parameters


class ParameterGroups:
    """The parameter groups of all optimizers, numbered one after another.

    Args:
        optimizers: torch.optim.SGD, Adam or AdamW, at least one.
        params: the model's trained parameters, with their names.

    Raises:
        InputError: there is no optimizer.
        JobError: a failed job has left the optimizer's state on its servers.
        UnsupportedError: servers do not have the optimizer or one of its options, or the optimizers do not have each parameter
            of the model once, and no others.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        if not optimizers:
            raise InputError("optimizer: got none, expected the optimizer whose update the servers shall do")
        self._optimizers = optimizers
        self._members: list[list[int]] = []  # by group, its parameters' ids
        self._holders: list[torch.optim.Optimizer] = []  # by group
        self._group_of: dict[int, int] = {}
        trained = {id(param): name for name, param in params}
        for optimizer in optimizers:
            _refuse_what_servers_do_not_know(optimizer)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in self._group_of:
                        raise UnsupportedError(
                            f"{trained[id(param)]} is in two optimizers: a server makes one update of each parameter a step; "
                            "update on the workers (gradlane.attach)"
                        )
                    if id(param) in trained:
                        self._group_of[id(param)] = len(self._members)
                    elif param.requires_grad and param.numel() > 0:
                        raise UnsupportedError(
                            f"{type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that is not the "
                            "model's: servers update the model's parameters; give the others an optimizer of their own"
                        )
                self._members.append([id(param) for param in group["params"] if id(param) in trained])
                self._holders.append(optimizer)
        missing = [name for name, param in params if id(param) not in self._group_of]
        if missing:
            raise UnsupportedError(f"{missing[0]} is trained and in no optimizer: freeze it, or give it to one")

    def of(self, param: torch.nn.Parameter) -> int:
        """The number of the group that has `param`."""
        return self._group_of[id(param)]

    def states_of(self, param: torch.nn.Parameter) -> Any:
        """The `state` of the optimizer that has `param`: a dictionary by parameter."""
        return self._holders[self._group_of[id(param)]].state

    def rules(self) -> list[Rule]:
        """Each group's rule with its present options, such as the learning rate: those of the groups that have its parameters
        now.

        Raises:
            UnsupportedError: some of its parameters have other options than the rest, or no optimizer has them any more.
        """
        present = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        place_of = {id(param): place for place, (_, group) in enumerate(present) for param in group["params"]}
        rules: list[Rule] = []
        for number, members in enumerate(self._members):
            places = {place_of.get(member) for member in members}
            found = {_rule(*present[place]) for place in places if place is not None}
            if None in places or len(found) > 1:
                raise UnsupportedError(
                    f"parameters of group {number} have got other options than the rest of it, or are in no optimizer: servers "
                    "keep groups as they were; close() the session and attach again"
                )
            rules.append(found.pop() if found else _NOTHING)
        return rules


def _refuse_what_servers_do_not_know(optimizer: torch.optim.Optimizer) -> None:
    outdated.check_state(optimizer)
    name = type(optimizer).__name__
    if own_class(optimizer) not in _KNOWN:
        raise UnsupportedError(
            f"servers do not know {name}, expected torch.optim.SGD, Adam or AdamW; gradlane.attach(model, optimizer, "
            "backend='server') updates on the workers, with any optimizer"
        )
    for group in optimizer.param_groups:
        for option, why in _REFUSED.items():
            if group.get(option):
                raise UnsupportedError(f"{name} with {option}=True {why}: servers do not know it")
        if group.get("fused") and group.get("momentum"):
            raise UnsupportedError(
                f"{name} with fused=True and momentum rounds otherwise than servers do; leave fused out, or update on the "
                "workers (gradlane.attach)"
            )


def _rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    if isinstance(optimizer, torch.optim.SGD):
        return Sgd(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )
    first, second = group["betas"]
    return Adam(
        lr=float(group["lr"]),
        betas=(float(first), float(second)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )

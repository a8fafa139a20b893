"""Optimizers as people write them, each in a few lines: name -> function that makes one for a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

EPS = 1e-8


class Each(Optimizer):
    """An optimizer that updates one parameter after the other, by `update`; `begin` sees all of them first."""

    def __init__(self, params: Any, lr: float = 0.02, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @property
    def every(self) -> Iterable[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group, p in self.every:
            p.sub_(group["lr"] * self.update(p, p.grad, self.state[p], group))

    def begin(self) -> None:
        pass

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


def adam(state: dict[str, Any], grad: Tensor) -> Tensor:
    if not state:
        state.update(step=0, m=torch.zeros_like(grad), v=torch.zeros_like(grad))
    state["step"] += 1
    m, v = state["m"].lerp_(grad, 0.1), state["v"].lerp_(grad * grad, 0.01)
    return (m / (1 - 0.9 ** state["step"])) / ((v / (1 - 0.99 ** state["step"])).sqrt() + EPS)


class Prodigy(Each):
    """An optimizer with one step size for all parameters, which it adapts from the second step on."""

    def begin(self) -> None:
        first = self.param_groups[0]
        d, up, down = first.setdefault("d", 1e-3), first.setdefault("up", 0.0), 0.0
        for _, p in self.every:
            state = self.state[p]
            if "start" not in state:
                state.update(start=p.clone(), s=torch.zeros_like(p))
            up += d * float((p.grad * (state["start"] - p)).sum())
            down += float(state["s"].add_(d * p.grad).abs().sum())
        for group in self.param_groups:
            group.update(up=up, d=max(d, up / down if down else d))

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(grad * grad, 0.01)
        return 10 * group["d"] * grad / (v.sqrt() + EPS)


class DAdaptation(Each):
    """An optimizer like Prodigy that keeps its step size in an attribute."""

    d, seen = 1e-3, 0.0

    def begin(self) -> None:
        self.seen += sum(float((p.grad * p.grad).sum()) for _, p in self.every)
        sums = [self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad) for _, p in self.every]
        self.d = max(self.d, 0.1 * sum(float((s * s).sum()) for s in sums) / self.seen)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return self.d * grad


class Lookahead(Optimizer):
    """A wrapper with its optimizer's groups; every third step it averages slow and fast weights."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)
        self.fast_state = optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if group["counter"] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class ScheduleFree(Each):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        k = state["k"] = state.get("k", 0) + 1
        z = state.setdefault("z", p.clone())
        moved = p.lerp(z, 1 / k) - group["lr"] * 0.9 * grad
        z.sub_(group["lr"] * grad)
        return (p - moved) / group["lr"]


class Both(Optimizer):
    """Two optimizers in one, which has its own groups."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([{**group} for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()


class Chained(Optimizer):
    """Two optimizers in one, which shows their groups as its own."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__([torch.zeros(1)], {})
        self.optimizers = {str(number): each for number, each in enumerate(optimizers)}
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers.values():
            each.step()


class EightBit(Each):
    """Momentum in blocks of 16 elements, with 8 bits for each element and a scale for each block."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        flat = torch.nn.functional.pad(grad.flatten(), (0, -grad.numel() % 16)).view(-1, 16)
        if "bits" in state:
            flat = flat + 0.9 * state["bits"].to(p.dtype) / 127 * state["scale"]
        state["scale"] = flat.abs().amax(1, keepdim=True) + 1e-12
        state["bits"] = (flat / state["scale"] * 127).round().to(torch.int8)
        return flat.flatten()[: p.numel()].view_as(p)


class Lars(Each):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad * p.norm() / (grad.norm() + EPS)


class Lamb(Each):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        step = adam(state, grad)
        return step * (p.norm() / (step.norm() + EPS)).clamp(max=10)


class Muon(Each):
    """Matrices by Newton and Schulz, all else by Adam."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if p.ndim != 2:
            return adam(state, grad)
        m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(grad)
        x = m / (m.norm() + EPS)
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


def root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix + 1e-4 * torch.eye(len(matrix), dtype=matrix.dtype))
    return vectors * values.clamp(min=1e-10).pow(power) @ vectors.T


class Shampoo(Each):
    """A preconditioner of rows and one of columns, recomputed every second step."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        g = grad if grad.ndim == 2 else grad.reshape(-1, 1)
        if not state:
            state.update(sides=[torch.zeros(n, n, dtype=p.dtype) for n in g.shape], roots=[], step=0)
        for side, x in zip(state["sides"], (g, g.T), strict=True):
            side.add_(x @ x.T)
        if state["step"] % 2 == 0:
            state["roots"] = [root(side, -0.25) for side in state["sides"]]
        state["step"] += 1
        return (state["roots"][0] @ g @ state["roots"][1]).view_as(p)


class Soap(Each):
    """Adam in the basis of Shampoo's preconditioners; the first step updates no weights."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if grad.ndim != 2:
            return adam(state, grad)
        if "rows" not in state:
            state.update(rows=grad @ grad.T + torch.linspace(1, 2, len(grad), dtype=p.dtype).diag(), adam={})
            state["basis"] = torch.linalg.eigh(state["rows"])[1]
            return torch.zeros_like(p)
        state["rows"].lerp_(grad @ grad.T, 0.05)
        return state["basis"] @ adam(state["adam"], state["basis"].T @ grad)


class Sam(Optimizer):
    """Computes the loss a second time, at weights moved along the gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "rho": 0.05})
        self.base = SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        every = [p for group in self.param_groups for p in group["params"]]
        ups = [self.param_groups[0]["rho"] * p.grad for p in every]
        for p, up in zip(every, ups, strict=True):
            p.add_(up)
        torch.enable_grad()(closure)()
        for p, up in zip(every, ups, strict=True):
            p.sub_(up)
        self.base.step()


class Lion(Each):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        m = state.setdefault("m", torch.zeros_like(p))
        way = m.lerp(grad, 0.1).sign()
        m.lerp_(grad, 0.01)
        return 0.1 * way


class AdEMAMix(Each):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        slow = state.setdefault("slow", torch.zeros_like(p)).lerp_(grad, 0.001)
        return adam(state.setdefault("fast", {}), grad) + 5 * slow


class Clipping(AdamW):
    """Clips the norm of all gradients within its step."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        super().step()


class Centralised(Each):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(1, keepdim=True) if grad.ndim > 1 else grad


class Agc(Each):
    """Clips the gradient of each row by the norm of its weights."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        dims = tuple(range(1, p.ndim)) or None
        most = 0.05 * p.norm(dim=dims, keepdim=True).clamp(min=1e-3)
        return grad * (most / grad.norm(dim=dims, keepdim=True).clamp(min=1e-6)).clamp(max=1)


def counting(model: nn.Module) -> Optimizer:
    """Return an optimizer that counts steps in a closure, and takes larger steps with time."""
    made = 0

    class Counting(SGD):
        def step(self, closure: Any = None) -> None:
            nonlocal made
            made += 1
            for group in self.param_groups:
                group["lr"] = 0.01 * made
            super().step()

    return Counting(model.parameters(), lr=0.01)


class Listing(SGD):
    """Holds the parameters in its own list, and slow weights in another one."""

    def __init__(self, params: Any) -> None:
        self.own = list(params)
        self.slow = [p.detach().clone() for p in self.own]
        super().__init__(self.own, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p, slow in zip(self.own, self.slow, strict=True):
            slow.lerp_(p, 0.2)
            p.lerp_(slow, 0.1)


def by_name(model: nn.Module) -> Optimizer:
    """Return an optimizer whose step looks up learning rates by name."""
    names = {p: name for name, p in model.named_parameters()}

    class ByName(Each):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group, p in self.every:
                p.sub_(group["lr"] * (0.1 if names.get(p, "") == "0.weight" else 1.0) * p.grad)

    return ByName(model.parameters())


class ByIdentity(Each):
    """Keeps learning rates by the id of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factors = {id(p): 0.1 * (n + 1) for group in self.param_groups for n, p in enumerate(group["params"])}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad * self.factors.get(id(p), 1.0)


class ByParameter(SGD):
    """Keeps momentum in a dict of its own, by parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.momentum: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.momentum[p] = 0.9 * self.momentum.get(p, 0.0) + p.grad
                p.sub_(group["lr"] * self.momentum[p])


class ByAddress(SGD):
    """Keeps momentum by the address of the parameter's memory."""

    kept: dict[int, Tensor]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        kept = self.__dict__.setdefault("kept", {})
        for group in self.param_groups:
            for p in group["params"]:
                kept[p.data_ptr()] = 0.9 * kept.get(p.data_ptr(), 0.0) + p.grad
                p.sub_(group["lr"] * kept[p.data_ptr()])


class Accumulating(Each):
    """Updates in every second step, by the sum of two gradients; counts in an attribute."""

    calls = 0

    def begin(self) -> None:
        self.calls += 1

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        held = state.setdefault("held", torch.zeros_like(p)).add_(grad)
        if self.calls % 2:
            return torch.zeros_like(p)
        found = held.clone()
        held.zero_()
        return found


def patched(model: nn.Module) -> Optimizer:
    """Return an optimizer whose step was replaced by one that clips."""
    optimizer = SGD(model.parameters(), lr=0.1)
    plain = optimizer.step

    def step(closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
        plain()

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


class Noisy(Each):
    """Adds noise."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad + 0.1 * torch.randn_like(p)


def hooked(model: nn.Module) -> Optimizer:
    """Clips in a hook before its step."""
    optimizer = SGD(model.parameters(), lr=0.1)

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    every = list(model.parameters())
    return [p for p in every if p.ndim > 1], [p for p in every if p.ndim <= 1]


def two(kind: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    matrices, vectors = halves(model)
    return kind(SGD(matrices, lr=0.1, momentum=0.9), AdamW(vectors, lr=0.02))


def listed(model: nn.Module) -> list[Optimizer]:
    matrices, vectors = halves(model)
    return [SGD(matrices, lr=0.1, momentum=0.9), AdamW(vectors, lr=0.02)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices, vectors = halves(model)
    return [torch.optim.Muon(matrices, lr=0.02), AdamW(vectors, lr=0.02)]


def named(model: nn.Module) -> dict[str, Optimizer]:
    """Return three optimizers by name. One has two groups, one is around another."""
    matrices, vectors = halves(model)
    groups = [{"params": matrices[1:2]}, {"params": matrices[2:], "lr": 0.05}]
    return {
        "first": Lookahead(SGD(matrices[:1], lr=0.1, momentum=0.9)),
        "rest": SGD(groups, lr=0.1, momentum=0.9),
        "vectors": AdamW(vectors, lr=0.02),
    }


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "prodigy": lambda model: Prodigy(model.parameters()),
    "d-adaptation": lambda model: DAdaptation(model.parameters()),
    "lookahead": lambda model: Lookahead(AdamW(model.parameters(), lr=0.02)),
    "schedule-free": lambda model: ScheduleFree(model.parameters()),
    "two in one": lambda model: two(Both, model),
    "chained": lambda model: two(Chained, model),
    "several": listed,
    "muon and adamw": muon_and_adamw,
    "several by name": named,
    "8-bit": lambda model: EightBit(model.parameters()),
    "lars": lambda model: Lars(model.parameters()),
    "lamb": lambda model: Lamb(model.parameters()),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.02),
    "muon": lambda model: Muon(model.parameters()),
    "shampoo": lambda model: Shampoo(model.parameters()),
    "soap": lambda model: Soap(model.parameters()),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters()),
    "sam": lambda model: Sam(model.parameters()),
    "lion": lambda model: Lion(model.parameters()),
    "ademamix": lambda model: AdEMAMix(model.parameters()),
    "clipping": lambda model: Clipping(model.parameters(), lr=0.02),
    "centralised": lambda model: Centralised(model.parameters()),
    "agc": lambda model: Agc(model.parameters()),
    "closure": counting,
    "list": lambda model: Listing(model.parameters()),
    "by name": by_name,
    "by id": lambda model: ByIdentity(model.parameters()),
    "by parameter": lambda model: ByParameter(model.parameters()),
    "by address": lambda model: ByAddress(model.parameters(), lr=0.1),
    "accumulating": lambda model: Accumulating(model.parameters()),
    "patched": patched,
    "hooked": hooked,
}

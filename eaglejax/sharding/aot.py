"""The real decode program of a plan, compiled ahead of time from shapes alone: its exact bytes per device and its collectives.

Nothing is downloaded or allocated. Where the machine has too few devices the mesh is made of virtual CPU devices: arguments, aliases and
collectives are those of any backend, temporaries are the CPU's own. With `compile_for` the program is compiled for GPUs that need not be
here, and the temporaries are theirs.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from eaglejax.errors import ConfigError
from eaglejax.kernels.select import compiling_for
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.sharding.absent_gpu import absent_gpus
from eaglejax.sharding.collectives import Collective, by_phase, read_collectives
from eaglejax.sharding.layout import whole_shape
from eaglejax.sharding.mesh import AXES, build_mesh
from eaglejax.sharding.plan import MeshSize, Plan
from eaglejax.speculation.programs import Programs

# the CPU's machine code is never run: nothing is gained by optimising it
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MOST_PER_LAYER = 2  # after attention, after the MLP


@dataclass(frozen=True)
class Compiled:
    """What the compiled program says, per device.

    `device`: what it was compiled for. `arguments`: bytes of weights, state and scalars. `aliased`: bytes of the state, which is updated
    in place. `temporary`: as XLA has them there. `collectives`: of one cycle. `sampling`: those in branches that only requests with
    filters take. `seconds`: how long it took.
    """

    platform: str
    device: str
    arguments: int
    aliased: int
    temporary: int
    collectives: list[Collective]
    sampling: list[Collective]
    seconds: float

    def differences(self, plan: Plan) -> list[str]:
        """Where the program and the plan's own arithmetic disagree; empty where they do not, to the byte."""
        found = []
        for what, ours, compiled in (
            ("arguments", plan.argument_bytes, self.arguments),
            ("state updated in place", sum(plan.state.values()), self.aliased),
            (
                "bytes of all collectives",
                sum(p.collective_bytes for p in plan.decoding),
                sum(c.bytes for c in self.collectives),
            ),
        ):
            if ours != compiled:
                found.append(f"{what}: {compiled:,} in the compiled program, {ours:,} by the plan's arithmetic")
        # XLA may combine collectives that do not wait for one another
        most = sum(phase.collective_count for phase in plan.decoding)
        if len(self.collectives) > most:
            found.append(f"collectives: {len(self.collectives)} in the compiled program, at most {most} by the plan")
        for layer, count in self.per_layer().items():
            if count > MOST_PER_LAYER:
                found.append(f"{layer} of the target: {count} collectives, at most {MOST_PER_LAYER} expected")
        return found

    def per_layer(self) -> Counter[str]:
        """Collectives of each layer of the target in one verification."""
        names = [scope for one in self.collectives for scope in one.scopes if "target" in one.scopes]
        return Counter(name for name in names if name.startswith("layer_"))

    def _beside(self, plan: Plan) -> str:
        """The plan's estimate for this program where a GPU compiled it; what a CPU's figure is worth."""
        if self.platform == "cpu":
            return "a CPU widens what it multiplies to float32: not a GPU's figure"
        ours = plan.decode_temporaries
        return f"our estimate for this program: {ours:,} ({100 * (ours / max(self.temporary, 1) - 1):+.1f} %)"

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """For machines. Bytes are per device, collectives those of one cycle."""
        counted = lambda found: {
            phase: {kind: {"count": n, "bytes": size} for kind, (n, size) in kinds.items()}
            for phase, kinds in by_phase(found).items()
        }
        return {
            "platform": self.platform,
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "argument_bytes": self.arguments,
            "updated_in_place_bytes": self.aliased,
            "temporary_bytes": self.temporary,
            "temporary_bytes_by_our_estimate": plan.decode_temporaries if self.platform != "cpu" else None,
            "collectives": counted(self.collectives),
            "most_in_a_target_layer": max(self.per_layer().values(), default=0),
            "collectives_when_sampling_with_filters": counted(self.sampling),
            "differences": self.differences(plan),
        }

    def to_text(self, plan: Plan) -> str:
        """For people."""
        devices = plan.question.mesh.devices
        virtual = self.platform == "cpu" and devices > 1
        kind = f"{devices} virtual CPU devices" if virtual else f"{devices} x {self.device}"
        lines = [
            f"The real decode program, compiled for {kind} from shapes alone in {self.seconds:.0f} s:",
            f"  arguments per device {self.arguments:,} bytes, of which {self.aliased:,} are updated in place",
            f"  temporaries of XLA for {self.device}: {self.temporary:,} bytes; {self._beside(plan)}",
        ]
        for title, found in (("", self.collectives), (" (sampling with filters only)", self.sampling)):
            for phase, kinds in by_phase(found).items():
                shown = ", ".join(f"{n} {name}s of {size / 1e3:.1f} KB" for name, (n, size) in kinds.items())
                lines.append(f"  {phase or 'elsewhere'}{title}: {shown}")
        lines.append(f"  at most {max(self.per_layer().values(), default=0)} collectives in a layer of the target")
        wrong = self.differences(plan)
        lines += [f"  DIFFERS: {line}" for line in wrong]
        if not wrong:
            lines.append("  bytes and collectives are as computed above, to the byte")
        return "\n".join(lines)


def make_devices(count: int) -> None:
    """Sees to it that this process can have `count` CPU devices. Has to run before anything uses jax's devices."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # jax runs already: `plan_mesh` says whether its devices are enough


def plan_mesh(size: MeshSize, absent: list[Any] | None = None) -> Mesh | None:
    """A mesh of the accelerators where there are enough of them, else of CPU devices; None for one device. `absent`: of these devices.

    Raises ConfigError where neither are enough.
    """
    if absent is not None:
        return build_mesh(Mesh(np.asarray(absent).reshape(size.data, size.model), AXES))
    if size.devices == 1:
        return None
    devices = jax.devices() if len(jax.devices()) >= size.devices else jax.devices("cpu")
    if len(devices) < size.devices:
        raise ConfigError(
            f"the program for {size.devices} devices cannot be compiled in a process that has {len(devices)}",
            where="mesh",
            fix=f"set XLA_FLAGS=--xla_force_host_platform_device_count={size.devices}, or leave the compilation out (--nocompile)",
        )
    grid = np.asarray(devices[: size.devices]).reshape(size.data, size.model)
    return build_mesh(Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2))


def compile_decode(plan: Plan, compile_for: str | None = None) -> Compiled:
    """Lowers and compiles the plan's decode program.

    Arguments:
        compile_for: a GPU that need not be here (`absent_gpu.known_gpus`); None for the devices of this machine.

    Raises ConfigError where there are too few devices, or no compiler for that GPU.
    """
    begin = time.perf_counter()
    asked, draft = plan.question, plan.draft
    mesh = plan_mesh(asked.mesh, absent_gpus(compile_for, asked.mesh.devices) if compile_for else None)
    programs = Programs(
        whole(plan.target.local.module, mesh),
        None if draft is None else whole(draft.local.module, mesh),
        plan.boundaries,
        plan.spec,
        asked.max_len,
        asked.dtype,
        mesh,
    )
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    capability = None if mesh is None else getattr(mesh.devices.flat[0], "compute_capability", None)
    with compiling_for(platform, capability):
        compiled = programs.lower_decode(asked.slots).compile(QUICK if platform == "cpu" else None)
    memory: Any = compiled.memory_analysis()
    found = [one for one in read_collectives(compiled.as_text() or "") if one.loops]
    return Compiled(
        platform,
        f"{compile_for} (compiled without one)" if compile_for else f"this {platform}",
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        [one for one in found if not one.conditional],
        [one for one in found if one.conditional],
        time.perf_counter() - begin,
    )


def whole(module: Target | Draft, mesh: Mesh | None) -> Any:
    """An abstract module of one device with the shapes of all devices' parts together, as `Programs` takes them."""
    graph, state = nnx.split(module)
    grown = lambda v: v.replace(jax.ShapeDtypeStruct(whole_shape(v, mesh), v.dtype))
    return nnx.merge(graph, jax.tree.map(grown, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))

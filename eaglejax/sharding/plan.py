"""The dry run: whether a target and its draft fit a mesh, and what a cycle costs there at least. Nothing is loaded or allocated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import jax.numpy as jnp

from eaglejax.config import PLAIN, Speculation
from eaglejax.errors import ConfigError
from eaglejax.measure.hardware import Hardware
from eaglejax.measure.roofline import Phase, cycle_seconds
from eaglejax.measure.work import Placed, cycle_phases, plain_phases
from eaglejax.sharding.local_shapes import local_draft, local_target
from eaglejax.sharding.memory import Sizes, program_rows, state_bytes, temporary_bytes, total
from eaglejax.sharding.mesh import DATA, MODEL, mesh_sizes
from eaglejax.sharding.plan_models import PlanModels
from eaglejax.sharding.rules import DraftPlacement, ExpertSplit, Placement, split_target
from eaglejax.sharding.weights import Weight, by_component, weigh

LARGEST_MESH = 1024  # tried for advice
EACH_SIZE = 64  # up to here advice tries every size of the model axis, beyond it powers of two
MOST_DEVICES = 4096  # along one axis
MOST_SLOTS = 256


@dataclass(frozen=True)
class MeshSize:
    """Devices along each axis: slots are spread over `data`, every layer over `model`. A plan's mesh may be larger than the machine."""

    data: int = 1
    model: int = 1

    @classmethod
    def read(cls, text: str) -> MeshSize:
        """From text such as "data=2,model=4", at most 4096 devices along each axis. Raises ConfigError."""
        sizes = mesh_sizes(text)
        for axis, size in sizes.items():
            if size > MOST_DEVICES:
                raise ConfigError(
                    "out of range",
                    where="mesh",
                    found=f"{axis}={size}",
                    expected=f"at most {MOST_DEVICES} along each axis",
                )
        return cls(sizes[DATA], sizes[MODEL])

    @property
    def devices(self) -> int:
        return self.data * self.model

    def __str__(self) -> str:
        return f"{DATA}={self.data},{MODEL}={self.model}"


@dataclass(frozen=True)
class Question:
    """What is asked of a plan. `slots` are rounded up to a multiple of the data axis, as the engine does (`Programs.slots_for`).

    `placement` of the draft: "replicated", whole on every device with its own copy of what it borrows, or "sharded" like the target.
    `expert_split`: "experts", "width" or "auto", as in the engine.
    `context`: tokens in the caches when a cycle's time is told. `taus`: tokens per cycle, bonus included, to tell tokens/s for.
    """

    models: PlanModels
    mesh: MeshSize
    spec: Speculation
    slots: int
    max_len: int
    hardware: Hardware
    dtype: str = "bfloat16"
    placement: DraftPlacement = "replicated"
    expert_split: ExpertSplit = "auto"
    context: int = 1024
    taus: tuple[float, ...] = (2.0, 3.0)
    asked_slots: int = field(init=False)

    def __post_init__(self):
        Placement(self.expert_split, self.placement)  # refuses what it does not know
        object.__setattr__(self, "asked_slots", self.slots)
        object.__setattr__(self, "slots", -(-self.slots // self.mesh.data) * self.mesh.data)
        if self.context > self.max_len:
            raise ConfigError(
                "more than max_len", where="context", found=self.context, expected=f"at most {self.max_len}"
            )


@dataclass(frozen=True)
class Plan:
    """The answer, per device. Made by `make_plan`."""

    question: Question
    target: Placed
    draft: Placed | None

    @property
    def notes(self) -> list[str]:
        """What stays whole or is shared, and what a user should know."""
        asked = self.question
        notes = [*self.target.local.notes, *(self.draft.local.notes if self.draft else ())]
        if asked.slots != asked.asked_slots:
            notes.append(f"slots: {asked.asked_slots} asked for, {asked.slots} held, a multiple of the data axis")
        if asked.max_len > asked.models.target.max_position:
            notes.append(
                f"max_len {asked.max_len} is beyond the {asked.models.target.max_position} positions the target was made for"
            )
        if self.draft is None and asked.spec.num_steps:
            notes.append("no draft: the tree is not used")
        return notes

    @property
    def spec(self) -> Speculation:
        return self.question.spec if self.draft is not None else PLAIN

    @property
    def local_slots(self) -> int:
        return self.question.slots // self.question.mesh.data

    @cached_property
    def target_weights(self) -> dict[str, int]:
        """Bytes by component."""
        return by_component(self.target.weights)

    @cached_property
    def draft_weights(self) -> dict[str, int]:
        """Bytes by component; what is borrowed and shared with the target's own arrays is not counted twice."""
        return by_component(self.held_by_draft)

    @cached_property
    def held_by_draft(self) -> list[Weight]:
        draft = self.draft
        if draft is None:
            return []
        config = self.question.models.draft
        assert config is not None
        borrowed = {"embedding": not config.own_embedding, "head": not config.own_head}
        return [w for w in draft.weights if self.copies or not borrowed.get(w.component, False)]

    @property
    def copies(self) -> bool:
        """Whether the draft copies what it borrows: one that is whole everywhere does where the target's is split; else the array is
        the target's own."""
        return self.question.placement == "replicated" and self.target.local.vocab_split

    @property
    def borrowed_copies(self) -> int:
        """Bytes of a replicated draft's own copies of the target's embedding and head."""
        config = self.question.models.draft
        if config is None or not self.copies:
            return 0
        names = [name for name, own in (("embedding", config.own_embedding), ("head", config.own_head)) if not own]
        return sum(size for name, size in self.draft_weights.items() if name in names)

    def sizes(self, slots: int | None = None, max_len: int | None = None) -> Sizes:
        draft = self.draft.local.config if self.draft else None
        item = self.target.itemsize
        return Sizes(
            self.target.local.config,  # type: ignore[arg-type]
            draft,  # type: ignore[arg-type]
            self.spec,
            self.local_slots if slots is None else slots,
            self.question.max_len if max_len is None else max_len,
            item,
        )

    @property
    def state(self) -> dict[str, int]:
        return state_bytes(self.sizes())

    @property
    def temporaries(self) -> dict[str, int]:
        """Of the program that needs more; an estimate (`memory.temporary_bytes`)."""
        return self._temporaries(self.sizes())[1]

    @property
    def hungrier(self) -> str:
        """The program whose temporaries these are: "prefill" or "decode"."""
        return self._temporaries(self.sizes())[0]

    @property
    def decode_temporaries(self) -> int:
        """Of the decode program alone; an estimate."""
        sizes = self.sizes()
        return total(temporary_bytes(sizes, program_rows(sizes)["decode"], self._dequantised))

    def _temporaries(self, sizes: Sizes) -> tuple[str, dict[str, int]]:
        programs = {name: temporary_bytes(sizes, rows, self._dequantised) for name, rows in program_rows(sizes).items()}
        return max(programs.items(), key=lambda item: total(item[1]))

    @cached_property
    def _dequantised(self) -> int:
        """The largest packed weight that is widened whole: experts are widened one at a time."""
        packed = [w.values for w in self.target.weights if w.packed and w.component != "experts"]
        return max(packed, default=0) * self.target.itemsize

    @property
    def boundaries(self) -> tuple[int, ...]:
        config = self.question.models.draft
        return config.boundaries if config is not None and self.draft is not None else ()

    @property
    def decoding(self) -> list[Phase]:
        """The phases of the decode program: of a cycle, or of a plain step without a draft."""
        return self.cycle or self.plain

    @property
    def argument_bytes(self) -> int:
        """Bytes of the decode program's arguments: all weights, a split draft's borrowed ones once more, state, two scalars' worth."""
        draft = self.draft.weights if self.draft is not None else []
        weights = sum(w.bytes for w in [*self.target.weights, *draft])
        # the number of cycles, and which slots have ended
        return weights + total(self.state) + 4 + self.local_slots

    @property
    def weights(self) -> int:
        return total(self.target_weights) + total(self.draft_weights)

    @property
    def needed(self) -> int:
        """Bytes of a device, temporaries estimated."""
        return self._needed(self.local_slots, self.question.max_len)

    def _needed(self, slots: int, max_len: int) -> int:
        sizes = self.sizes(slots, max_len)
        return self.weights + total(state_bytes(sizes)) + total(self._temporaries(sizes)[1])

    @property
    def free(self) -> int:
        """Bytes left on a device; negative where the plan does not fit."""
        return self.question.hardware.memory - self.needed

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def largest_max_len(self, slots: int) -> int:
        """The most tokens per slot that fit with `slots` slots in all; 0 where none do."""
        local = -(-slots // self.question.mesh.data)
        low, high = 0, self.question.models.target.max_position
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self._needed(local, middle) <= self.question.hardware.memory else (low, middle - 1)
            )
        return low

    def largest(self) -> list[tuple[int, int]]:
        """(slots, most tokens per slot) for 1, 2, 4, ... slots per device, as far as any tokens fit."""
        rows, slots = [], self.question.mesh.data
        while slots <= MOST_SLOTS * self.question.mesh.data and (most := self.largest_max_len(slots)) > 0:
            rows.append((slots, most))
            slots *= 2
        return rows

    @cached_property
    def plain(self) -> list[Phase]:
        """A step of plain decoding."""
        return plain_phases(self.target, self.local_slots, self.question.context)

    @cached_property
    def cycle(self) -> list[Phase]:
        """A cycle of speculation; empty without a draft."""
        if self.draft is None:
            return []
        return cycle_phases(self.target, self.draft, self.spec, self.local_slots, self.question.context)

    def seconds(self, phases: list[Phase]) -> float:
        return cycle_seconds(phases, self.question.hardware, self.question.mesh.model)

    @property
    def breakeven(self) -> float | None:
        """Tokens per cycle, bonus included, above which speculation beats plain decoding at these floors."""
        return self.seconds(self.cycle) / self.seconds(self.plain) if self.cycle else None

    def refusal(self) -> ConfigError | None:
        """Why this layout is impossible and what to change, or None where it fits."""
        if self.fits:
            return None
        return ConfigError(
            "does not fit",
            where=f"{self.question.models.name} on mesh {self.question.mesh}",
            found=f"{self.needed:,} bytes needed per device, {self.question.hardware.memory:,} there: {-self.free:,} too many",
            fix=self._advice(),
        )

    def _advice(self) -> str:
        ways = []
        if most := self.largest_max_len(self.question.slots):
            ways.append(f"max_len of at most {most:,} with {self.question.slots} slots")
        if self.question.placement == "replicated" and self.draft is not None and self.question.mesh.model > 1:
            if make_plan(replace(self.question, placement="sharded")).fits:
                ways.append("draft_placement=sharded")
        if meshes := self._fitting_meshes():
            ways.append(f"a mesh of {' or '.join(map(str, meshes))}")
        return (
            "would fit: " + "; ".join(ways)
            if ways
            else "no larger mesh, shorter max_len or draft placement alone makes it fit"
        )

    def _fitting_meshes(self) -> list[MeshSize]:
        """The next smaller model axis that fits, which there can be where this one divides badly, and the next larger."""
        asked = self.question
        smaller = range(asked.mesh.model - 1, 0, -1) if self.target.local.notes else ()
        doubled = [2**power for power in range(1, LARGEST_MESH.bit_length()) if 2**power > EACH_SIZE]
        larger = [*range(asked.mesh.model + 1, EACH_SIZE + 1), *(n for n in doubled if n > asked.mesh.model)]
        found = []
        for sizes in (smaller, larger):
            for model in sizes:
                mesh = MeshSize(asked.mesh.data, model)
                if self._may_fit(model) and make_plan(replace(asked, mesh=mesh)).fits:
                    found.append(mesh)
                    break
        return found

    @cached_property
    def _whole_weights(self) -> int:
        """Bytes of the target on one device."""
        alone = replace(self.question, mesh=MeshSize(), models=replace(self.question.models, draft=None))
        return make_plan(alone).weights

    def _may_fit(self, model: int) -> bool:
        """Told without building the modules: something is split, and a fair share of the target is not too much by itself."""
        if self._whole_weights > model * self.question.hardware.memory:
            return False
        split = split_target(self.question.models.target, model, Placement(self.question.expert_split), [])
        parts = [split.vocab, *(over for layer in split.layers for over in (layer.attention, layer.mlp))]
        return model == 1 or any(over.axis is not None for over in parts)


def make_plan(question: Question) -> Plan:
    """Shapes, bytes and floors for one layout. Raises ConfigError for a question that makes no sense; a layout that does not fit is
    an answer (`Plan.refusal`)."""
    models, mesh = question.models, question.mesh
    dtype = jnp.dtype(question.dtype)
    packings = models.storage.packings if models.storage else {}
    target = local_target(models.target, mesh.model, dtype, question.expert_split, packings)
    placed = Placed(models.target, target, weigh(target.leaves, packings), mesh.model, dtype.itemsize)
    if models.draft is None or question.spec.num_steps == 0:
        return Plan(question, placed, None)
    over = mesh.model if question.placement == "sharded" else 1
    draft = local_draft(models.draft, over, dtype)
    return Plan(question, placed, Placed(models.draft, draft, weigh(draft.leaves), over, dtype.itemsize))

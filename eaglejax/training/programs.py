"""The compiled programs of a training run, on one device or on a mesh: the target's pass over a batch, and one train step.

On a mesh both are one manual program for all devices (`sharding/spmd.py`), as the engine's are. The target is split by the engine's
rules, and the rows of a batch lie over the data axis. The draft, its master weights and moments are whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eaglejax.models.config import DraftConfig
from eaglejax.models.target import Target
from eaglejax.sharding.layout import EVERYWHERE, place, weight_specs
from eaglejax.sharding.mesh import AXES, DATA, MODEL, axis_size
from eaglejax.sharding.spmd import on_mesh
from eaglejax.training import trainer
from eaglejax.training.memory import check_fits
from eaglejax.training.ttt import Text


def step_rows(batch: int, mesh: Mesh | None) -> P:
    """How the rows of a train step lie: over all devices where they divide, else over the data axis alone.

    In the second case the devices along "model" take the same rows and do the same.
    """
    everywhere = axis_size(mesh, DATA) * axis_size(mesh, MODEL)
    return P(AXES) if batch % everywhere == 0 else P(DATA)


def mesh_line(batch: int, mesh: Mesh) -> str:
    """The mesh, and what each device takes of a batch, in one line."""
    data, model = axis_size(mesh, DATA), axis_size(mesh, MODEL)
    divisor = data if step_rows(batch, mesh) == P(DATA) else data * model
    return (
        f"mesh: data {data} x model {model}; of {batch} rows each device takes {batch // data} through its part of the target "
        f"and {batch // divisor} through the draft"
    )


def put_text(text: Text, mesh: Mesh | None, rows: P = EVERYWHERE) -> Text:
    """Token rows on the devices, split as `rows` says."""
    return Text(*(place(part, mesh, rows) for part in (text.tokens, text.positions, text.segments, text.loss)))


class TargetPass:
    """One pass of the target over packed rows, compiled once for each shape of them; documents do not see each other."""

    def __init__(self, target: Target, boundaries: tuple[int, ...], mesh: Mesh | None = None, rows: P = EVERYWHERE):
        """Arguments: rows: how the rows lie on the mesh; by default every device has all of them."""
        graph, state = nnx.split(target)
        structure = jax.tree.structure(state)
        # plain lists: jax flattens a module's state in Python, for every weight and at every call
        self._arrays = jax.tree.leaves(state)

        def run(arrays, tokens, positions, segments):
            own = nnx.merge(graph, jax.tree.unflatten(structure, arrays))
            return trainer.packed_pass(own, tokens, positions, segments, boundaries)

        self._program = on_mesh(mesh, run, (weight_specs(state), rows, rows, rows), rows)

    def __call__(self, text: Text) -> trainer.TargetFeatures:
        """Arguments: text: placed by `put_text`."""
        return trainer.TargetFeatures(*self._program(self._arrays, text.tokens, text.positions, text.segments))

    def lower(self, text: Text) -> jax.stages.Lowered:
        """The program for such a text, lowered: for memory and HLO questions."""
        return self._program.lower(self._arrays, text.tokens, text.positions, text.segments)


class TrainStep:
    """`trainer.train_step` for batches of one shape. On a mesh gradients, losses and counts are those of the whole batch."""

    def __init__(
        self,
        config: DraftConfig,
        settings: trainer.TrainSettings,
        batch: int,
        mesh: Mesh | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        """Arguments: batch: rows, of all devices together. say: told how much memory the step takes, once it is compiled."""
        self._config, self._settings, self._batch, self._mesh, self._say = config, settings, batch, mesh, say
        self._compiled: Any = None

    def __call__(
        self,
        state: trainer.TrainState,
        frozen: trainer.Frozen,
        text: Text,
        features: trainer.TargetFeatures,
        rate: float,
    ) -> tuple[trainer.TrainState, trainer.Figures]:
        """The next state and the step's figures; `state` is donated. Compiled at the first call.

        Raises ConfigError, before anything is run, where the step does not fit a device.
        """
        if self._compiled is None:
            compiled = self.lower(state, frozen, text, features, rate).compile()
            need = check_fits(compiled, self._batch, text.tokens.shape[1], self._mesh)
            each = "" if self._mesh is None else " on each device"
            self._say(f"a train step takes {need / 1e9:.3f} GB beside weights and text{each}")
            self._compiled = compiled
        return self._compiled(*self._given(state, frozen, text, features, rate))

    def lower(
        self,
        state: trainer.TrainState,
        frozen: trainer.Frozen,
        text: Text,
        features: trainer.TargetFeatures,
        rate: float,
    ) -> jax.stages.Lowered:
        """The program for such arguments, lowered: for memory and HLO questions."""
        records = (state, (text, features), (frozen, self._rate(rate)))
        structures = [jax.tree.structure(record) for record in records]
        over = () if self._mesh is None else AXES

        def step(*given):
            state, (text, features), (frozen, rate) = map(jax.tree.unflatten, structures, given)
            return trainer.train_step(
                state, frozen, text, features, rate, config=self._config, settings=self._settings, over=over
            )

        specs = (EVERYWHERE, step_rows(self._batch, self._mesh), EVERYWHERE)
        program = on_mesh(self._mesh, step, specs, EVERYWHERE, donate_argnums=0)
        return program.lower(*self._given(state, frozen, text, features, rate))

    def _given(self, state, frozen, text, features, rate: float) -> list[list[jax.Array]]:
        # lists rather than records, which would check the types of what jax puts into them while it lowers
        return [jax.tree.leaves(record) for record in (state, (text, features), (frozen, self._rate(rate)))]

    def _rate(self, rate: float) -> jax.Array:
        return place(np.float32(rate), self._mesh)


def whole(tree: Any, mesh: Mesh | None) -> Any:
    """The arrays of a tree, wherever they lie, whole on every device of the mesh; as they are without one."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, EVERYWHERE))

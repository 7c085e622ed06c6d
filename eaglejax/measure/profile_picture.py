"""A profile as bars: what every phase took, and the floor below it. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from pathlib import Path

from eaglejax.errors import ConfigError
from eaglejax.measure.profile_phases import group_of
from eaglejax.measure.profile_result import Profile

COLOURS = {"draft": "#2a9d8f", "verify": "#264653", "host": "#9a8c98"}
OTHER = "#e9c46a"


def check_picture(file: Path) -> None:
    """Refuse, before anything runs, what `save_picture` could not do. Raises ConfigError."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib", where="picture", found="not installed", fix='pip install "eaglejax[plots]"'
        ) from None
    from matplotlib.backend_bases import FigureCanvasBase  # pyright: ignore[reportMissingImports]

    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in known:
        raise ConfigError(
            "no kind of picture", where="picture", found=str(file), expected=f"a name that ends in .{', .'.join(known)}"
        )
    if not file.parent.is_dir():
        raise ConfigError("no such folder", where="picture", found=str(file.parent))


def save_picture(profile: Profile, file: Path) -> None:
    """One bar per phase, coloured by draft, verify and the rest; a mark at its floor."""
    check_picture(file)
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    shown = [phase for phase in reversed(profile.phases) if phase.seconds > 0]
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    names = [phase.name for phase in shown]
    colours = [COLOURS.get(group_of(name), OTHER) for name in names]
    bars = axes.barh(names, [1e3 * phase.seconds for phase in shown], color=colours)
    axes.bar_label(bars, [f"{100 * phase.seconds / profile.cycle_seconds:.1f} %" for phase in shown], padding=3)
    floors = [(index, 1e3 * phase.floor.total) for index, phase in enumerate(shown) if phase.floor is not None]
    if floors:
        places, values = zip(*floors, strict=True)
        axes.plot(values, places, "|", color="#e76f51", markersize=12, markeredgewidth=2, label="floor")
        axes.legend(loc="lower right")
    setting = profile.setting
    axes.set_title(f"{setting.model}, {setting.spec.describe()}\n{setting.device}, {setting.dtype}", fontsize=9)
    axes.set_xlabel(
        f"ms of one traced cycle of {1e3 * profile.cycle_seconds:.2f} ms (distortion {profile.distortion:.2f})"
    )
    axes.margins(x=0.12)
    try:
        figure.savefig(str(file), dpi=150)
    except OSError as error:
        raise ConfigError("cannot be written", where="picture", found=f"{file}: {error.strerror}") from None

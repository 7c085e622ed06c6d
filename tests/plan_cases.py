"""Plans for tests, with the defaults written out."""

from eaglejax.config import Speculation
from eaglejax.measure.hardware import read_hardware
from eaglejax.sharding.plan import MeshSize, Plan, Question, make_plan
from eaglejax.sharding.plan_models import read_models


def plan_of(
    model: str,
    *,
    data: int = 1,
    devices: int = 8,
    tree: tuple[int, int, int] = (3, 1, 4),
    slots: int = 1,
    max_len: int = 8192,
    placement: str = "sharded",
    draft: str | None = "auto",
    hardware: str = "h200-nvlink",
    **figures: float,
) -> Plan:
    return make_plan(
        Question(
            read_models(model, draft),
            MeshSize(data, devices),
            Speculation(*tree),
            slots,
            max_len,
            read_hardware(hardware).having(**figures),
            placement=placement,
            context=min(1024, max_len),
        )
    )

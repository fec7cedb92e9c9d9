"""Plans read back from a device, for people and for tests."""

from octavo.planning.form import DEFAULT_SPLIT, PlanForm, layout_of, schedule_config
from octavo.planning.picture import Machine, describe, picture
from octavo.planning.schedule import Schedule, ScheduleConfig, WorkItem
from octavo.problem import Arch, AttentionSpec
from octavo.shapes import Tensor
from octavo.work_item import HEADER_WORDS, ITEM_WORDS, NUM_ITEMS, NUM_SMALL_ITEMS


def items_end(spec: AttentionSpec, words: int, config: ScheduleConfig) -> int:
    """Where the items of a plan of so many words end, in words: what `read_plan` wants of it."""
    return HEADER_WORDS + ITEM_WORDS * layout_of(spec, words, config).capacity


def read_plan(plan: Tensor) -> Schedule:
    """The schedule in a plan's header and items, which are on the host."""
    words = plan[HEADER_WORDS:].view(-1, ITEM_WORDS).tolist()
    items = [WorkItem(*(*w[:3], (w[4] << 32) | (w[3] & 0xFFFFFFFF), *w[5:15])) for w in words]
    main, small = int(plan[NUM_ITEMS]), int(plan[NUM_SMALL_ITEMS])
    return Schedule(items[:main], items[len(items) - small :][::-1])


def explain_plan(spec: AttentionSpec, plan: Tensor, form: PlanForm, arch: Arch) -> list[str]:
    """Lines for people about the plan that is in a workspace: copies its items to the host, which waits for the device.

    Times are predicted for the device whose rates are known without measuring, the H200; `octavo info --batch` measures
    those of others.
    """
    config = schedule_config(form, DEFAULT_SPLIT)
    schedule = read_plan(plan[: items_end(spec, plan.numel(), config)].cpu())
    machine = Machine.h200(spec, max(arch.num_sms, 1))
    return list(describe(picture(spec, schedule, form, machine), rates_known="H200" in arch.name))

"""The trainers' layouts, by name."""

from sglang_hs_capture.export.formats.base import TrainerFormat
from sglang_hs_capture.export.formats.eagle_pt import EaglePt
from sglang_hs_capture.export.formats.modelopt import ModelOpt
from sglang_hs_capture.export.formats.self_describing import SelfDescribing
from sglang_hs_capture.export.formats.specforge import SpecForge
from sglang_hs_capture.export.formats.speculators import Speculators
from sglang_hs_capture.export.options import Format

FORMATS: dict[Format, type[TrainerFormat]] = {
    kind.name: kind for kind in (EaglePt, Speculators, SpecForge, ModelOpt, SelfDescribing)
}

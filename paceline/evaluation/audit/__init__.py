"""Is the target's distribution kept for this pair, with these parameters, on this device and in this format?"""

from paceline.evaluation.audit.certificate import Certificate
from paceline.evaluation.audit.run import Size, audit

__all__ = ["Certificate", "Size", "audit"]

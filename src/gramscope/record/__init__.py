"""Watching a training run: what to measure when; callbacks for plain loops, Lightning and Hugging Face."""

from gramscope.record import feature_readings as feature_readings
from gramscope.record import health_readings as health_readings  # all four register what they measure
from gramscope.record import theory_readings as theory_readings
from gramscope.record import training_readings as training_readings
from gramscope.record.readings import READERS, Reader, Reading, reader
from gramscope.record.watch import Scope, WatchWarning, watch

__all__ = ["READERS", "Reader", "Reading", "Scope", "WatchWarning", "reader", "watch"]

"""Watching a training run: what to measure when; callbacks for plain loops, Lightning and Hugging Face."""

from gramscope.record import feature_measures as feature_measures
from gramscope.record import health_measures as health_measures  # all of these register what they measure
from gramscope.record import theory_measures as theory_measures
from gramscope.record import training_measures as training_measures
from gramscope.record.scope import Scope, WatchWarning
from gramscope.record.start_watch import watch
from gramscope.record.watched_measures import WATCHED_MEASURES, MeasuredValues, WatchedMeasure, watched_measure

__all__ = ["WATCHED_MEASURES", "MeasuredValues", "Scope", "WatchWarning", "WatchedMeasure", "watch", "watched_measure"]

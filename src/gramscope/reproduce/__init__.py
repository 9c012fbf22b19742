"""``gramscope reproduce``: published tables and figures, computed again by one command each."""

from gramscope.reproduce.correlations import RankCorrelation, rank_correlation

__all__ = ["RankCorrelation", "rank_correlation"]

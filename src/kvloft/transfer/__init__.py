"""The workers' side: views of engine pages, and copies between pages and slots."""

from kvloft.transfer.base import Copier, PageViews, check_job
from kvloft.transfer.cpu import CpuCopier
from kvloft.transfer.likeness import MOST_UNLIKE

__all__ = ["MOST_UNLIKE", "Copier", "CpuCopier", "PageViews", "check_job"]

"""The workers' side: views of engine pages, and copies between pages and slots."""

from kvloft.transfer.base import Copier, PageViews, check_job
from kvloft.transfer.cpu import CpuCopier

__all__ = ["Copier", "CpuCopier", "PageViews", "check_job"]

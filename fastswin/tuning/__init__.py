"""Launch configurations measured on a card: what may be chosen, and the tables that remember.

``problem.py`` names a launch by its shape, ``space.py`` lists its candidates, ``layers.py`` the
ways to build a layer from launches, ``table.py`` reads what ``fastswin tune`` wrote. Nothing here
measures anything: that is ``bench/tune*.py``.
"""

from fastswin.tuning.problem import KernelProblem
from fastswin.tuning.table import TableRefusedError, TuningTable, find_table

__all__ = ["KernelProblem", "TableRefusedError", "TuningTable", "find_table"]

"""Launch configurations measured on a card: what may be chosen, and the tables that remember.

``problem.py`` names a launch by its shape, ``space.py`` lists its candidates, ``layers.py`` the
ways to build a layer from launches, ``document.py`` is the file that ``fastswin tune`` writes,
``table.py`` answers from it, ``merge.py`` makes one of several. Nothing here measures anything:
that is ``bench/tune*.py``.
"""

from fastswin.tuning.document import TableRefusedError
from fastswin.tuning.problem import KernelProblem
from fastswin.tuning.table import TuningTable, find_table

__all__ = ["KernelProblem", "TableRefusedError", "TuningTable", "find_table"]

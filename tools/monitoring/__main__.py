"""This command writes the files."""

from tools.monitoring import docs
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import DASHBOARDS, RULES
from tools.monitoring.rules import rules_file

RULES.parent.mkdir(exist_ok=True)
RULES.write_text(rules_file(), encoding="utf-8")
for board in BOARDS:
    (DASHBOARDS / f"{board.name}.json").write_text(board_file(board), encoding="utf-8")
docs.PAGE.write_text(docs.renewed(docs.PAGE.read_text(encoding="utf-8")), encoding="utf-8")

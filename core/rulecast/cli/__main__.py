"""`python -m rulecast.cli` is the `rulecast` command."""

import sys

from rulecast.cli import main

sys.exit(main())

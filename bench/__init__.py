"""The budgets, measured. See README.md."""

"""What ranks show, in the notebook: lines that stream, widgets, and one error out of many."""

"""What a run does around its steps, each in a file that can be read alone.

`loop.train` calls them in order: `before_step`, `after_step`, `at_end`.
"""

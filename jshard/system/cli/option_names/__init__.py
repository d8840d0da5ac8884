"""What options of other libraries are called here.

A line has names of a library, then what to write instead: `~` stands before a key of a
recipe, and "none" says that there is nothing to set.
"""

from jshard.system.cli.option_names import hugging_face, trainers

TABLES = hugging_face.TABLES | trainers.TABLES

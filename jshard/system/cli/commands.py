"""The commands by name, each ``python -m jshard.NAME`` and ``jshard-NAME``."""

COMMANDS = {
    "train": "trains the model of a recipe, fully sharded over all devices",
    "launch": "starts the processes of a job, here or by ssh, and restarts them",
    "plan": "predicts memory, traffic and time of a recipe on absent GPUs",
    "generate": "continues prompts with a trained model",
    "perplexity": "measures how well a trained model predicts a text",
    "evaluate": "scores a trained model on tasks of lm_eval",
    "inspect": "shows and verifies the checkpoints of a run",
    "report": "writes the report of a run",
    "export": "writes the model of a checkpoint as safetensors files",
    "tokenize": "turns text, JSONL or Parquet into token files",
}

"""`titan-ckpt demo`: what it needs, its folder, and its acts in order."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.output import write_json
from titan_ckpt.errors import TitanError, UsageError

EPILOG = """\
A model of 6 M parameters learns a page of Python's own manual on 4 processes and saves to a real S3 server on this machine. The
job is killed during an upload, resumes on 2 processes, is resharded, resumes on another mesh, and is exported: transformers then
writes the page. Last, a hanging job is diagnosed. Every act checks what it says. Nothing is downloaded.

examples:
  pip install 'titan-ckpt[demo]'
  titan-ckpt demo                             # 4 minutes of processor time; files in titan-demo/
  titan-ckpt demo --json --dir /tmp/demo      # the facts as JSON, the story on stderr
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("--dir", type=Path, default="titan-demo", help="folder of all files (default titan-demo)")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of the run (default 80)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between saves; divides --steps (default 20)")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Play all acts; 0 if every one holds. TitanError from the first that does not."""
    steps, every = arguments.steps, arguments.save_every
    if every < 1 or steps % every or steps < 2 * every:
        raise UsageError(
            f"--steps {steps} --save-every {every}: give --steps a multiple of --save-every, at least twice it"
        )
    import transformers  # noqa: F401  the last act needs it, and fails now rather than after two minutes

    from titan_ckpt.demo.acts import DemoContext, play, shown
    from titan_ckpt.demo.page import write_page
    from titan_ckpt.demo.s3_server import running_server
    from titan_ckpt.demo.shell import Shell
    from titan_ckpt.demo.story import StoryLog

    folder = arguments.dir.resolve()
    prepare(folder)
    story = StoryLog(folder / "facts.json", is_quiet=arguments.json)
    try:
        with running_server(folder / "s3", ["demo"]) as server:
            shell = Shell(server.environment, folder / "commands.log", story.command)
            page = write_page(folder)
            play(
                DemoContext(folder=folder, page=page, steps=steps, save_every=every, server=server, shell=shell), story
            )
    except TitanError as error:
        story.write(failed=str(error))
        raise
    story.print(f"all eight acts held in {story.facts['seconds']:.0f} s; facts: {shown(folder / 'facts.json')}")
    if arguments.json:
        write_json(story.facts)
    return 0


def prepare(folder: Path) -> None:
    """Create an empty folder; UsageError if there is something in it, which the demo never deletes."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder as --dir")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; delete it if an earlier demo made it, or give another --dir")
    folder.mkdir(parents=True, exist_ok=True)


DEMO = Command(configure=configure, run=run)

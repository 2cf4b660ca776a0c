"""Job scripts as text, against golden files for every site; ``python -m`` this to renew them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from alchemist_ray.deploy.slurm import script, sites
from alchemist_ray.deploy.slurm.script import Place, Request
from alchemist_ray.errors import JobError
from tests.support import commands

GOLDEN = Path(__file__).resolve().parents[3] / "deploy" / "slurm" / "golden"
SHOWN = Path(__file__).resolve().parents[4] / "cray" / "alchemist.sbatch"
COMMAND = ["python", "cray/truncated_svd.py", "--name", "it's"]


def golden(name: str, dialect: str) -> str:
    """The expected golden file of a site and dialect."""
    cpus = 8 if dialect == "pbs" else None
    request = Request(3, "0:30:00", "svd", cpus=cpus, account="m888")
    folder = "/home/ada/jobs/svd"
    place = Place(folder, f"{folder}/log", "/home/ada/alchemist/.venv/bin", name)
    return script.render(sites.load(name), request, COMMAND, place, dialect)


def golden_in_image(name: str, runtime: str, image: str) -> str:
    """The same in an image."""
    site = sites.load(name)
    request = Request(3, "0:30:00", "svd", account="m888", image=sites.image(site, image, runtime))
    place = Place("/home/ada/jobs/svd", "/home/ada/jobs/svd/log", "/home/ada/venv/bin", name)
    return script.render(site, request, COMMAND, place, "pbs" if name == "cray-cs" else "slurm")


def golden_words() -> str:
    """For every recipe, the words before a command."""
    env = {
        "HOME": "/home/ada",
        "I_MPI_ROOT": "/opt/intel/mpi",
        "LD_LIBRARY_PATH": "/opt/lib",
        "SCRATCH": "/scratch/ada",
    }
    lines = []
    for name, runtime, image in IMAGES:
        words = sites.image(sites.load(name), image, runtime).words(env)
        lines += [f"{name}, {runtime}:", *(f"  {word}" for word in words), ""]
    return "\n".join(lines)


def shown() -> str:
    """The script in ``cray/``, for people to read."""
    folder = "$HOME/.alchemist/jobs/$SLURM_JOB_ID"
    place = Place(folder, "alchemist-%j.log", "$HOME/alchemist/.venv/bin", "generic-slurm")
    command = ["python", "cray/truncated_svd.py"]
    request = Request(3, "30", "svd")
    return script.render(sites.load("generic-slurm"), request, command, place, "slurm")


IMAGES = [
    ("cray-xc", "shifter", "docker:me/alchemist-on-ray:0.1.0"),
    ("cray-cs", "apptainer", "/home/ada/alchemist.sif"),
    ("cray-cs", "singularity", "/home/ada/alchemist.sif"),
    ("cray-cs-slurm", "apptainer", "/home/ada/alchemist.sif"),
    ("cray-cs-slurm", "singularity", "/home/ada/alchemist.sif"),  # the 2019 paper's case
    ("generic-slurm", "apptainer", "docker://me/alchemist-on-ray:0.1.0"),
    ("generic-slurm", "singularity", "docker://me/alchemist-on-ray:0.1.0"),
    ("generic-slurm", "podman", "me/alchemist-on-ray:0.1.0"),
    ("cray-ex", "podman-hpc", "me/alchemist-on-ray:0.1.0"),
    ("generic-slurm", "charliecloud", "$SCRATCH/alchemist-on-ray"),
]
SCRIPTS = {
    f"{path.stem}.{dialect}.sh": partial(golden, path.stem, dialect)
    for path in sorted(sites.SHIPPED.glob("*.toml"))
    for dialect in ("slurm", "pbs")
} | {f"{case[0]}.{case[1]}.sh": partial(golden_in_image, *case) for case in IMAGES}


@pytest.mark.parametrize("file", SCRIPTS)
def test_the_script_of_every_site_and_of_a_job_in_an_image_is_the_golden_one(file: str) -> None:
    text = SCRIPTS[file]()
    assert text == (GOLDEN / file).read_text()
    assert commands.run("bash", "-n", given=text, code=0).stderr == ""


def test_the_words_that_run_a_program_in_an_image_are_the_golden_ones() -> None:
    assert golden_words() == (GOLDEN / "containers.txt").read_text()
    assert {runtime for _, runtime, _ in IMAGES} == set(sites.RECIPES)


def test_what_is_missing_for_an_image_is_said() -> None:
    site = sites.load("generic-slurm")
    assert sites.image(site, None, "shifter") is None
    with pytest.raises(JobError, match="site generic-slurm names no container runtime"):
        sites.image(site, "x", None)
    with pytest.raises(JobError, match="unknown container runtime 'docker'"):
        sites.image(site, "x", "docker")
    for name, runtime in ("cray-xc", "podman"), ("cray-ex", "podman"), ("cray-cs", "shifter"):
        with pytest.raises(JobError, match=f"of site {name} for .* do not fit {runtime}: copy"):
            sites.image(sites.load(name), "x", runtime)
    with pytest.raises(JobError) as refused:  # which sets no library
        sites.image(sites.load("cray-cs-slurm"), "x", "podman")
    assert "container.library" not in str(refused.value)
    image = sites.image(sites.load("cray-cs"), "x.sif", None)
    assert image is not None
    with pytest.raises(JobError, match="I_MPI_ROOT is not set: see"):
        image.words({"HOME": "/home/ada"})


def rendered(request: Request, command: tuple[str, ...] = ("true",), place: str = "/j") -> str:
    """The script of a request where a site does not matter."""
    paths = Place(place, f"{place}/log", "/b", "x")
    return script.render(sites.load("generic-slurm"), request, list(command), paths, "slurm")


def test_a_short_job_is_told_its_end_when_half_of_it_is_over() -> None:
    text = rendered(Request(1, "1"))
    assert "#SBATCH --signal=B:TERM@30" in text
    assert "--spare 30" in text
    assert "--spare" not in rendered(Request(1, "5"))


def test_a_job_that_gets_sigterm_early_is_warned_of() -> None:
    """Slurm may send it a minute earlier than it was asked to."""
    site = sites.load("generic-slurm")
    warning = script.early_signal(site, Request(1, "2"))
    assert "-t 2 the program has 0 to 60 s, the start of Ray included" in warning
    assert "SIGTERM 60 s before the time limit, and up to 60 s earlier" in warning
    assert "has 60 to 120 s" in script.early_signal(site, Request(1, "3"))
    assert not script.early_signal(site, Request(1, "5"))


def test_names_with_spaces_are_quoted() -> None:
    text = rendered(Request(1, "5", "my run", account="m888"), place="/my jobs/svd")
    assert '#SBATCH --job-name="my run"' in text
    assert '#SBATCH --output="/my jobs/svd/log"' in text
    assert "#SBATCH --account=m888" in text


def test_the_script_that_is_shown_is_what_is_made() -> None:
    assert SHOWN.read_text() == shown()


def test_the_shell_fills_in_variables_and_nothing_else(tmp_path: Path) -> None:
    site = sites.parse(
        {"environment": {"A": "$WHERE/x", "B": 'a "b" `c` $(d) \\ e', "C": "plain"}}, "x", "x"
    )
    text = script.render(site, Request(1, "5"), ["true"], Place("/j", "/j/log", "/b", "x"), "slurm")
    exports = [line for line in text.splitlines() if line.startswith(("export A", "export B"))]
    command = "\n".join([*exports, 'printf "%s|%s" "$A" "$B"'])
    said = commands.output("bash", "-c", command, env={"WHERE": "/scratch"})
    assert said == '/scratch/x|a "b" `c` $(d) \\ e'


@pytest.mark.parametrize(
    ("told", "total"),
    [("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-00:30", 88200)],
)
def test_time_limits_as_slurm_writes_them(told: str, total: int) -> None:
    assert script.seconds(told) == total


def test_a_request_that_makes_no_sense() -> None:
    for time in ("soon", "0", "-5", ""):
        with pytest.raises(JobError, match="is not a time limit"):
            rendered(Request(1, time))
    with pytest.raises(JobError, match="at least 1"):
        rendered(Request(0, "5"))
    with pytest.raises(JobError, match="give it after --"):
        rendered(Request(1, "5"), ())


def test_whole_nodes_unless_cpus_are_named() -> None:
    assert "#SBATCH --exclusive" in rendered(Request(2, "5"))
    shared = rendered(Request(2, "5", cpus=4, options=["--x=1"]))
    assert "--exclusive" not in shared
    assert "#SBATCH --cpus-per-task=4" in shared
    assert "#SBATCH --x=1" in shared
    assert "#SBATCH --signal=B:TERM@60" in shared


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for golden_file, make in SCRIPTS.items():
        (GOLDEN / golden_file).write_text(make())
    (GOLDEN / "containers.txt").write_text(golden_words())
    SHOWN.write_text(shown())

"""The words in which verifier, worker, gate and loop say how a kernel did. Each prints as itself, in JSON and in
text."""

from enum import Enum


class Word(str, Enum):
    """A member is equal to its value, the word, and prints as it."""

    __str__ = str.__str__


class Status(Word):
    """How one case, a whole verification, or a candidate ended."""

    # The kernel did as it should.
    OK = "OK"  # right on everything that was tried
    DECLINED = "DECLINED"  # of a variant: the kernel says aloud that it does not serve it
    DOUBTFUL = "DOUBTFUL"  # of a variant: wrong where a right kernel may be; reported, and no reason to refuse it

    # The kernel cannot be run to its end.
    COMPILE_ERROR = "COMPILE_ERROR"  # its compiler refuses it
    IMPORT_ERROR = "IMPORT_ERROR"  # its file cannot be loaded or bound
    LAUNCH_ERROR = "LAUNCH_ERROR"  # a launch asks for more than the GPU has
    RUNTIME_ERROR = "RUNTIME_ERROR"  # it raises, or its process ends without a sound report
    ILLEGAL_ACCESS = "ILLEGAL_ACCESS"  # it reads or writes memory that is not its own, and dies of it
    OOM = "OOM"  # memory is exhausted
    NO_SPACE = "NO_SPACE"  # the disk is full
    TIMEOUT = "TIMEOUT"  # no answer in time

    # The kernel's result is wrong.
    WRONG_SHAPE = "WRONG_SHAPE"  # another shape, number or structure of outputs than the reference's
    WRONG_DTYPE = "WRONG_DTYPE"
    WRONG_STRIDE = "WRONG_STRIDE"  # another memory layout than the reference's
    WRONG_DEVICE = "WRONG_DEVICE"  # an output lies on another device
    WRONG_VALUES = "WRONG_VALUES"  # elements, or what the call leaves of the state, are beyond the tolerance
    NONFINITE = "NONFINITE"  # NaN or Inf where the reference has a number
    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"  # memory beside an input or an output was accessed
    INPUT_MUTATED = "INPUT_MUTATED"  # an input or a parameter was changed
    ALIASED_OUTPUT = "ALIASED_OUTPUT"  # an output shares memory with an input or with another call's output

    # The kernel's result or time cannot be trusted.
    CHEAT_SUSPECT = "CHEAT_SUSPECT"  # it tampers with what judges it, or does not do the work itself
    IMPOSSIBLE_TIME = "IMPOSSIBLE_TIME"  # faster than the documented peaks of the card allow
    OWN_WORK_NOT_CHECKED = "OWN_WORK_NOT_CHECKED"  # the profiler named no kernel, so nobody knows whose work it is

    # Something else than the kernel is at fault.
    NOT_INTERPRETABLE = "NOT_INTERPRETABLE"  # Triton's CPU interpreter cannot run it; a GPU may
    INVALID_REFERENCE = "INVALID_REFERENCE"  # the reference itself fails
    INVALID_TASK = "INVALID_TASK"  # no kernel can be judged on this task
    BASELINE_ERROR = "BASELINE_ERROR"  # what the kernel is compared with fails
    USAGE = "USAGE"  # the caller asks for something that does not exist
    NO_GPU = "NO_GPU"  # torch cannot use the GPU of this machine
    INTERNAL = "INTERNAL"  # nothing was checked

    # A candidate of the unattended loop that no verifier saw.
    PLAN = "PLAN"  # its plan is incomplete
    CRASH = "CRASH"  # the process that examined it died


class Speed(Word):
    """How the kernel's time compares with another's, by paired rounds."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    EQUAL = "EQUAL"
    AMBIGUOUS = "AMBIGUOUS"  # measure again, accept nothing


class AgentOutcome(Word):
    """What an agent of the unattended loop did with its brief."""

    ANSWERED = "answered"  # it left a kernel and a plan
    TIMED_OUT = "timed out"
    FAILED = "failed"  # its command ended with an error, or its answer cannot be read
    NO_ANSWER = "no answer"  # it left no kernel
    NO_PLAN = "no plan"
    TOO_LARGE = "too large"  # one of its files
    UNCHANGED = "unchanged"  # its kernel is the one that it got
    REFUSED_PLAN = "refused plan"
    TRIED_BEFORE = "tried before"  # its kernel was judged already, or is that of another agent of the round
    FORBIDDEN_FILES = "forbidden files"  # it wrote where it may not
    NO_CALL_LEFT = "no call left"
    INTERRUPTED = "interrupted"  # the run ended first

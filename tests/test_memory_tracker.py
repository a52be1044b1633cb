"""The memory tracker against allocations whose bytes are known beforehand."""

import copy
import gc
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from seqsplit.memory import track_memory

ROOT = Path(__file__).resolve().parents[1]
N = 1 << 18  # elements of a buffer
BUFFER = 4 * N  # its bytes in float32

both = pytest.mark.parametrize("allocator", [False, True], ids=["storages", "allocator"])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def buffers(count: int = 1, **options) -> torch.Tensor:
    return torch.empty(count * N, **options)


# --- plain allocations -------------------------------------------------------------------------


@both
def test_peak_live_and_largest_of_planted_allocations(allocator):
    kept = []
    with track_memory(allocator=allocator) as memory:
        first = buffers(1)
        second = buffers(3)
        del second
        kept.append(buffers(2))
        del first
    assert memory.peak_bytes == 4 * BUFFER
    assert memory.live_bytes == 2 * BUFFER
    assert memory.largest_bytes == 3 * BUFFER
    assert "empty" in memory.largest_op


@both
def test_nothing_allocated(allocator):
    x = buffers()
    with track_memory(allocator=allocator) as memory:
        x.view(2, -1)
    assert (memory.peak_bytes, memory.live_bytes, memory.largest_bytes) == (0, 0, 0)
    assert memory.largest_op is None
    assert memory.timeline == []
    assert memory.peak_breakdown == {}


@both
def test_timeline_has_every_change_in_order(allocator):
    with track_memory(allocator=allocator) as memory:
        x = buffers(1)
        y = buffers(2)
        del x
        del y
    seconds, live = zip(*memory.timeline, strict=True)
    assert live == (BUFFER, 3 * BUFFER, 2 * BUFFER, 0)
    assert list(seconds) == sorted(seconds)
    assert seconds[0] >= 0


@both
def test_breakdown_adds_up_to_the_peak_by_op(allocator):
    x = torch.ones(N)
    with track_memory(allocator=allocator) as memory:
        y = x.exp()
        gone = torch.zeros(4 * N)
        del gone
        z = y.sin() + y  # at the peak: y, its sine and the sum; but the zeros were larger
    assert memory.peak_bytes == 5 * BUFFER
    assert sum(memory.peak_breakdown.values()) == memory.peak_bytes
    names = list(memory.peak_breakdown)
    assert "zeros" in names[0] and "exp" in names[1]
    assert memory.live_bytes == y.nbytes + z.nbytes


def test_figures_can_be_read_inside_the_block():
    with track_memory() as memory:
        x = buffers(2)
        assert memory.live_bytes == 2 * BUFFER
        del x
        assert (memory.live_bytes, memory.peak_bytes) == (0, 2 * BUFFER)


def test_a_reference_cycle_counts_until_it_is_collected():
    gc.collect()
    with track_memory() as memory:
        cycle = [buffers()]
        cycle.append(cycle)
        del cycle
        assert memory.live_bytes == BUFFER
        gc.collect()
        assert memory.live_bytes == 0


def test_frees_after_the_block_do_not_count():
    with track_memory() as memory:
        x = buffers()
    del x
    assert memory.live_bytes == BUFFER


# --- storages: sharing, resizing, replacing -----------------------------------------------------


def test_views_and_aliases_count_once_and_keep_their_base():
    with track_memory() as memory:
        x = buffers(2)
        row, same, parameter = x.view(2, N)[1], x.detach(), torch.nn.Parameter(x)
        assert memory.live_bytes == memory.peak_bytes == 2 * BUFFER
        del x, same, parameter
        assert memory.live_bytes == 2 * BUFFER  # the view still holds all of it
        del row
        assert memory.live_bytes == 0


def test_views_of_what_existed_count_nothing():
    x = buffers(2)
    with track_memory() as memory:
        y = x[:N].unflatten(0, (4, -1)).transpose(0, 1)
        z = y.expand(3, *y.shape).detach()
    assert memory.peak_bytes == 0
    assert z.numel() == 3 * N


@both
def test_out_argument_that_grows(allocator):
    x = torch.ones(N)
    with track_memory(allocator=allocator) as memory:
        out = torch.empty(0)
        torch.add(x, x, out=out)
        assert out.numel() == N
    assert memory.peak_bytes == memory.live_bytes == BUFFER


def test_out_arguments_of_an_op_that_returns_nothing():
    x = torch.ones(2 * N)
    with track_memory() as memory:
        out = [torch.empty(0), torch.empty(0)]
        torch.split_with_sizes_copy(x, [N, N], out=out)
        assert memory.live_bytes == sum(part.nbytes for part in out) == 2 * BUFFER


def test_resizing_a_tensor():
    with track_memory() as memory:
        x = buffers(1)
        x.resize_(3 * N)
        assert memory.live_bytes == 3 * BUFFER
        x.resize_(N)  # a tensor that shrinks keeps its storage
        assert memory.live_bytes == 3 * BUFFER
    assert memory.largest_bytes == 3 * BUFFER


def test_growth_of_a_tensor_that_existed_counts_what_was_added():
    x = buffers(1)
    with track_memory() as memory:
        x.resize_(3 * N)
        assert memory.live_bytes == 2 * BUFFER
        del x
        assert memory.live_bytes == 0


def test_resizing_a_storage_directly():
    original = torch.UntypedStorage.resize_
    x = buffers(2)
    with track_memory() as memory:
        y = buffers(2)
        y.untyped_storage().resize_(0)
        assert memory.live_bytes == 0
        y.untyped_storage().resize_(5 * BUFFER)
        assert memory.live_bytes == 5 * BUFFER
        x.untyped_storage().resize_(0)  # existed: freeing it is not ours to subtract
        assert memory.live_bytes == 5 * BUFFER
        x.untyped_storage().resize_(3 * BUFFER)
        assert memory.live_bytes == 6 * BUFFER
    assert torch.UntypedStorage.resize_ == original


def test_set_and_data_replace_a_storage():
    with track_memory() as memory:
        x, y = buffers(1), buffers(2)
        x.set_(y)
        assert memory.live_bytes == 2 * BUFFER
        y.data = buffers(4)
        assert memory.live_bytes == 6 * BUFFER
        del x
        assert memory.live_bytes == 4 * BUFFER


def test_tensors_made_below_the_dispatcher():
    values = [0.0] * N
    with track_memory() as memory:
        x = torch.tensor(values)
        assert memory.live_bytes == BUFFER
        y = copy.deepcopy(x)
        assert memory.live_bytes == 2 * BUFFER
        file = io.BytesIO()
        torch.save(y, file)
        file.seek(0)
        z = torch.load(file)
        assert memory.live_bytes == 3 * BUFFER
        del x, y, z
        assert memory.live_bytes == 0


def test_fake_and_meta_tensors_do_not_count():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with track_memory() as memory:
        buffers(1, device="meta").exp()
        with FakeTensorMode():
            torch.nn.Linear(512, 512)(torch.ones(512, 512)).sum().backward()
    assert memory.peak_bytes == 0


def test_wrapper_subclasses_count_their_inner_tensors():
    with track_memory() as memory:
        x = TwoTensor(torch.zeros(N), torch.zeros(N))
        assert memory.live_bytes == 2 * BUFFER
        y = x * 2
        assert memory.live_bytes == 4 * BUFFER
        del x, y
        assert memory.live_bytes == 0


def test_subclasses_without_dispatch_count_as_tensors():
    class Tagged(torch.Tensor):
        pass

    with track_memory() as memory:
        x = torch.zeros(N).as_subclass(Tagged)
        y = x + 1
        assert isinstance(y, Tagged)
    assert memory.live_bytes == 2 * BUFFER


def test_sparse_gradients_count_indices_and_values():
    embedding = torch.nn.Embedding(1000, 64, sparse=True)
    tokens = torch.arange(100)
    with track_memory() as memory:
        embedding(tokens).sum().backward()
    indices, values = embedding.weight.grad._indices(), embedding.weight.grad._values()
    expected = indices.untyped_storage().nbytes() + values.untyped_storage().nbytes()
    assert expected >= 100 * (8 + 64 * 4)
    assert memory.live_bytes == expected


def test_device_filter():
    with track_memory(device="cpu") as counted, track_memory(device="cuda") as ignored:
        x = buffers()
    assert counted.live_bytes == x.nbytes
    assert ignored.peak_bytes == 0


# --- what existed before ------------------------------------------------------------------------


def test_freeing_what_existed_shows_only_if_it_was_named():
    x, y = buffers(2), buffers(3)
    with track_memory(existing=[x]) as memory:
        del y
        assert memory.live_bytes == 0
        z = buffers(1)
        del x
        assert memory.live_bytes == -BUFFER
        z = buffers(3)
    assert z.nbytes == 3 * BUFFER
    assert memory.peak_bytes == 2 * BUFFER  # 3 new ones and the old z, less the 2 freed


def test_existing_takes_modules_with_their_gradients():
    model = torch.nn.Linear(512, 512, bias=False)
    model(torch.ones(1, 512)).sum().backward()
    size = model.weight.nbytes
    with track_memory(existing={"model": (model,)}) as memory:
        model.zero_grad(set_to_none=True)
        assert memory.live_bytes == -size
        del model
        assert memory.live_bytes == -2 * size
    assert memory.peak_bytes == memory.largest_bytes == 0
    assert memory.largest_op is None


def test_existing_does_not_keep_anything_alive():
    x = buffers()
    tracker = track_memory(existing=[x])
    with tracker:
        del x
        assert tracker.live_bytes == -BUFFER


def test_existing_refuses_other_things():
    with pytest.raises(TypeError, match="existing= takes modules, tensors"):
        track_memory(existing=["model"])
    with pytest.raises(ValueError, match="existing= cannot be combined with allocator=True"):
        track_memory(existing=[buffers()], allocator=True)


# --- autograd -----------------------------------------------------------------------------------


def test_tensors_only_autograd_holds_are_alive():
    x = torch.ones(N, requires_grad=True)
    with track_memory() as memory:
        y = x.exp()
        z = y.mul(2).sum()
        assert memory.live_bytes == BUFFER + z.nbytes  # exp keeps its output; the product is gone
        del y
        assert memory.live_bytes == BUFFER + z.nbytes
        del z
        assert memory.live_bytes == 0


@both
def test_gradients_of_parameters(allocator):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 8, bias=False))
    x = torch.ones(1, 256)
    model(x).sum().backward()  # whatever is set up on the first backward
    model.zero_grad(set_to_none=True)
    with track_memory(allocator=allocator) as memory:
        model(x).sum().backward()
    grads = sum(p.grad.nbytes for p in model.parameters())
    assert memory.live_bytes == grads
    assert memory.largest_bytes == 4 * 256 * 512


def sines(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = x.sin()
    return x


def test_a_chain_keeps_every_link_and_checkpoints_keep_segment_inputs():
    x = torch.ones(N, requires_grad=True)
    with track_memory() as memory:
        loss = sines(x, 12).sum()
        forward = memory.live_bytes - loss.nbytes
        loss.backward()
    assert forward == 11 * BUFFER  # each sine keeps its input: x existed, the 12th output is gone
    # Backward of the last sine: 11 links, the gradient (an expanded scalar), its cosine, product.
    assert memory.peak_bytes - 13 * BUFFER < 64
    x.grad = None

    with track_memory() as memory:
        y = x
        for _ in range(3):
            y = checkpoint(sines, y, 4, use_reentrant=False)
        loss = y.sum()
        del y
        forward = memory.live_bytes
        loss.backward()
    assert 2 * BUFFER <= forward < 2 * BUFFER + 16_384  # plus what checkpointing notes (RNG)
    # Last segment: inputs of segments 2 and 3, then 3 recomputed links, cosine, product; a
    # gradient that is not an expanded scalar joins in the earlier segments, an input less.
    assert 7 * BUFFER <= memory.peak_bytes < 7 * BUFFER + 16_384
    del loss
    assert memory.live_bytes == x.grad.nbytes + 4  # and the loss, alive when the block ended


class Hungry(torch.autograd.Function):
    """The identity, with temporaries of known sizes in forward and backward."""

    @staticmethod
    def forward(ctx, x):
        buffers(5)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        buffers(9)
        return grad


@both
def test_temporaries_inside_custom_functions(allocator):
    x = torch.ones(N, requires_grad=True)
    with track_memory(allocator=allocator) as forward:
        y = Hungry.apply(x)
    assert forward.largest_bytes == forward.peak_bytes == 5 * BUFFER
    with track_memory(allocator=allocator) as backward:
        y.backward(torch.ones(N))
    assert backward.largest_bytes == 9 * BUFFER
    assert backward.peak_bytes == 10 * BUFFER  # and the gradient passed in


def test_backward_in_the_engine_s_other_threads_is_seen():
    """Reentrant backward beyond 60 levels moves to pool threads, as device threads are on a GPU."""
    import threading

    threads, sizes = set(), []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            before = memory.live_bytes
            block = torch.empty(1000 + ctx.depth, dtype=torch.uint8)
            sizes.append(memory.live_bytes - before - block.nbytes)
            if ctx.depth:
                with torch.enable_grad():
                    x = torch.ones(1, requires_grad=True)
                    Nested.apply(x, ctx.depth - 1).backward(torch.ones(1))
            return grad, None

    x = torch.ones(1, requires_grad=True)
    y = Nested.apply(x, 70)
    with track_memory() as memory:
        y.backward(torch.ones(1))
    assert len(threads) > 1
    assert sizes == [0] * 71


def test_watching_sums_gradients_out_of_place():
    """What the NOTE in seqsplit/memory.py says: one gradient buffer more than unwatched."""

    def backward(allocator: bool) -> int:
        x = torch.ones(N, requires_grad=True)
        y = x * 1.0
        loss = (y * 2 + y * 3 + y * 4).sum()
        with track_memory(allocator=allocator) as memory:
            loss.backward()
        return round(memory.peak_bytes / BUFFER)

    assert backward(allocator=True) == 2
    assert backward(allocator=False) == 3


def test_kernels_temporaries_show_in_the_allocator_only():
    q = torch.ones(1, 2, 512, 64)

    def peak(allocator: bool) -> int:
        with track_memory(allocator=allocator) as memory:
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert memory.largest_bytes >= out.nbytes
        return memory.peak_bytes

    assert peak(allocator=True) > peak(allocator=False) >= q.nbytes


def test_compiled_code_is_compiled_and_seen():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.exp().sin(), backend=backend)
    x = torch.ones(N)
    with track_memory() as memory:
        y = compiled(x)
    assert len(graphs) == 1
    assert memory.live_bytes == y.nbytes
    assert memory.peak_bytes == 2 * BUFFER


# --- blocks: errors, nesting, reuse ---------------------------------------------------------------


@both
def test_an_exception_leaves_nothing_behind(allocator):
    resize = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), track_memory(allocator=allocator) as memory:
        x = buffers(2)
        del x
        1 / 0  # noqa: B018
    assert memory.peak_bytes == 2 * BUFFER
    assert torch.UntypedStorage.resize_ == resize
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch._C._autograd._profiler_enabled()
    with track_memory(allocator=allocator) as again:
        buffers(1)
    assert again.peak_bytes == BUFFER


def test_an_exception_in_backward():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            buffers(3)
            raise ZeroDivisionError

    y = Fails.apply(torch.ones(1, requires_grad=True))
    with track_memory() as memory:
        with pytest.raises(ZeroDivisionError):
            y.backward()
        del y
        buffers(1)
    assert memory.peak_bytes - 3 * BUFFER < 64


def test_blocks_the_allocator_knows_from_an_earlier_measurement():
    with track_memory(allocator=True):
        x = buffers(1)
    with track_memory(allocator=True) as memory:
        del x
        buffers(2)
    assert (memory.peak_bytes, memory.live_bytes) == (2 * BUFFER, 0)


def test_nested_blocks_each_count_their_own():
    with track_memory() as outer:
        x = buffers(1)
        with track_memory() as inner:
            y = buffers(2)
            del x  # before the inner block: baseline there
            z = y.storage_offset()
            y.untyped_storage().resize_(4 * BUFFER)
        w = buffers(1)
        del y, w
    assert z == 0
    assert (inner.peak_bytes, inner.live_bytes) == (4 * BUFFER, 4 * BUFFER)
    assert (outer.peak_bytes, outer.live_bytes) == (5 * BUFFER, 0)


def test_a_storage_tracker_inside_an_allocator_tracker():
    with track_memory(allocator=True) as outer, track_memory() as inner:
        buffers(2)
    assert outer.peak_bytes == inner.peak_bytes == 2 * BUFFER


def test_a_tracker_serves_one_block():
    tracker = track_memory()
    with tracker, pytest.raises(RuntimeError, match="this tracker is open"):
        tracker.__enter__()
    with pytest.raises(RuntimeError, match="call track_memory\\(\\) again"):
        tracker.__enter__()


def test_the_allocator_s_figures_come_after_the_block():
    with track_memory(allocator=True) as memory, pytest.raises(RuntimeError, match="only after"):
        _ = memory.peak_bytes
    assert memory.peak_bytes == 0


def test_the_allocator_tracker_prints_nothing():
    code = """if True:
        import torch
        from seqsplit.memory import track_memory
        with track_memory(allocator=True):
            torch.empty(10)
        """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_allocator_tracker_does_not_nest():
    with profile(use_kineto=True), pytest.raises(RuntimeError, match="already running"):
        track_memory(allocator=True).__enter__()
    with track_memory(allocator=True) as outer:
        with pytest.raises(RuntimeError, match="already running"):
            track_memory(allocator=True).__enter__()
        buffers(1)
    assert outer.peak_bytes == BUFFER


# --- any sequence of allocations ------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.integers(0, 5)),
        st.tuples(st.just("free"), st.integers(0, 9)),
        st.tuples(st.just("view"), st.integers(0, 9)),
        st.tuples(st.just("grow"), st.integers(0, 9)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_any_sequence_of_steps_has_the_peak_a_ledger_has(steps):
    """Tensors that are made, viewed, grown and dropped, against a ledger of reference counts."""
    held = []  # (tensor, key of its storage)
    ledger = {}  # key -> [references, bytes]
    peak = largest = 0
    with track_memory() as memory:
        for key, (step, value) in enumerate(steps):
            if step == "make":
                held.append((torch.empty(value * 1000, dtype=torch.uint8), key))
                ledger[key] = [1, value * 1000]
            elif held:
                tensor, of = held[value % len(held)]
                if step == "view":
                    held.append((tensor[:0], of))
                    ledger[of][0] += 1
                elif step == "grow":
                    ledger[of][1] = max(ledger[of][1], tensor.nbytes + 500)
                    tensor.resize_(tensor.nbytes + 500)
                else:
                    del held[value % len(held)]
                    ledger[of][0] -= 1
                del tensor
            live = sum(size for references, size in ledger.values() if references)
            peak = max(peak, live)
            largest = max([largest] + [size for references, size in ledger.values() if references])
            assert memory.live_bytes == live
    assert memory.peak_bytes == peak
    assert memory.largest_bytes == largest
    held.clear()


# --- CUDA ---------------------------------------------------------------------------------------


def test_cuda_peak_is_none_without_cuda():
    with track_memory() as memory:
        buffers()
    if not torch.cuda.is_available():
        assert memory.cuda_peak_bytes is None


@pytest.mark.gpu
@needs_gpu
@both
def test_cuda_peaks_agree(allocator):
    torch.empty(1, device="cuda")
    kept = buffers(4, device="cuda")
    with track_memory(allocator=allocator) as outer:
        x = buffers(3, device="cuda")
        del x
        with track_memory() as inner:
            y = buffers(2, device="cuda")
    assert outer.peak_bytes == outer.cuda_peak_bytes == 3 * BUFFER
    assert inner.peak_bytes == inner.cuda_peak_bytes == 2 * BUFFER
    assert kept.nbytes == 2 * y.nbytes


@pytest.mark.gpu
@needs_gpu
def test_cuda_backward_runs_in_a_device_thread_and_is_seen():
    x = torch.ones(N, requires_grad=True, device="cuda")
    y = Hungry.apply(x)
    grad = torch.ones(N, device="cuda")
    with track_memory() as memory:
        y.backward(grad)
    assert memory.largest_bytes == 9 * BUFFER

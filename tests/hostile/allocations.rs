//! Graphs that ask for more memory than there is, of a server whose address space is limited. An allocation that fails
//! ends a process, so each must be refused before.

use std::time::{Duration, Instant};

use kolo::{Code, DType, Error, Graph, Output, RunOptions, Tensor, WhileOptions};

use crate::support::{PATIENCE, one_at_a_time};
use crate::victim::{Victim, endless};

/// What the server may have: enough to serve.
const MEGABYTES: u64 = 1500;

/// Enough to serve, and little enough to be filled soon by small elements.
const LESS: u64 = 1100;

/// The error of a graph that asks for too much; the server lives on.
#[track_caller]
fn refused(victim: &Victim, what: &str, attack: impl for<'g> Fn(&'g Graph) -> Output<'g>) -> Error {
    let g = kolo::graph();
    let fetch = attack(&g);
    let error = victim.connect(&g).fetch(fetch).expect_err(what);
    println!("{what}: {error}");
    victim.still_works();
    error
}

#[track_caller]
fn exhausted(victim: &Victim, what: &str, attack: impl for<'g> Fn(&'g Graph) -> Output<'g>) {
    let error = refused(victim, what, attack);
    assert_eq!(error.code(), Code::ResourceExhausted, "{what}: {error}");
    assert!(error.message().contains("OOM") || error.message().contains("too long"), "{what}: {error}");
}

/// A tensor array of so many elements.
fn array(g: &Graph, size: i32) -> (Output<'_>, Output<'_>) {
    array_of(g, size, DType::F32)
}

fn array_of(g: &Graph, size: i32, dtype: DType) -> (Output<'_>, Output<'_>) {
    let size = g.constant(size);
    let array = g.op("TensorArrayV3").input(size).attr("dtype", dtype).attr("dynamic_size", true).build();
    (array.output(0), array.output(1))
}

#[test]
fn tensor_arrays_text_and_lists_are_asked_for_before_they_are_taken() {
    let _turn = one_at_a_time();
    let victim = Victim::limited(MEGABYTES, &[]);
    exhausted(&victim, "a tensor array of 2^31 - 1 elements", |g| array(g, i32::MAX).1);
    exhausted(&victim, "a tensor array that is written far behind its end", |g| {
        let (handle, flow) = array(g, 0);
        let index = g.constant((1 << 28) - 1);
        g.op("TensorArrayWriteV3").inputs([handle, index, g.constant(1.0f32), flow]).out()
    });
    exhausted(&victim, "strings that double", |g| {
        endless(g.constant("ab"), |text| g.op("StringJoin").inputs([text, text]).out())
    });
    exhausted(&victim, "strings that are added", |g| {
        endless(g.constant("ab"), |text| g.op("Add").inputs([text, text]).out())
    });
    exhausted(&victim, "a list of strings that doubles and is joined", |g| {
        let many = g.op("Fill").input(g.constant([1000])).input(g.constant("x".repeat(100_000).as_str())).out();
        let joined = |list| g.op("ReduceJoin").inputs([list, g.constant([0i32])]).out();
        joined(g.op("Fill").input(g.constant([1000])).input(joined(many)).out())
    });
    exhausted(&victim, "a replacement that is longer than what it replaces", |g| {
        let (text, rewrite) = (g.constant("a".repeat(100_000).as_str()), g.constant("b".repeat(100_000).as_str()));
        g.op("RegexReplace").inputs([text, g.constant("a"), rewrite]).out()
    });
    exhausted(&victim, "many short replacements that are longer than what they replace", |g| {
        let texts = g.op("Fill").input(g.constant([1 << 20])).input(g.constant("a")).out();
        g.op("RegexReplace").inputs([texts, g.constant("a"), g.constant("b".repeat(4000).as_str())]).out()
    });
    exhausted(&victim, "a list of empty strings", |g| {
        g.op("Fill").input(g.constant([1 << 30])).input(g.constant("")).out()
    });
    exhausted(&victim, "a tensor", |g| {
        let large = g.op("Fill").input(g.constant([1 << 30])).input(g.constant(1.0f32)).out();
        g.op("Max").input(large).input(g.constant(0i32)).out()
    });
}

/// An endless loop that counts, for what is done in its body with the counter.
fn forever<'g>(g: &'g Graph, body: impl FnOnce(Output<'g>) -> kolo::Operation<'g>) -> Output<'g> {
    endless(g.constant(0i32), |i| {
        let done = body(i);
        g.control_dependencies(&[done], || g.op("Identity").input(i + 1i32).out())
    })
}

/// So many numbers, other ones in every iteration.
fn numbers(i: Output<'_>) -> Output<'_> {
    let g = i.graph();
    let (n, first) = (g.constant(50_000), i * 50_000i32);
    g.op("Range").inputs([first, first + n, g.constant(1i32)]).out()
}

/// A long text that is another one in every iteration.
fn text(i: Output<'_>) -> Output<'_> {
    i.graph().op("AsString").input(i).attr("width", 60_000i64).out()
}

/// The error names what has filled the memory. Each has a server of its own: what the allocator keeps of freed blocks is less
/// than their size, but it counts as address space.
#[track_caller]
fn filled(what: &str, named: &str, attack: impl for<'g> Fn(&'g Graph) -> Output<'g>) {
    let error = refused(&Victim::limited(LESS, &[]), what, attack);
    assert_eq!(error.code(), Code::ResourceExhausted, "{what}: {error}");
    assert!(error.message().contains(named), "{what}: {error}");
}

#[test]
fn queues_that_grow_are_refused() {
    let _turn = one_at_a_time();
    filled("text that fills a queue", "FIFOQueueV2 texts", |g| {
        let queue = g.op("FIFOQueueV2").name("texts").attr("component_types", vec![DType::Str]).out();
        forever(g, |i| g.op("QueueEnqueueV2").input(queue).input(text(i)).build())
    });
    for (kind, dtypes) in [
        ("FIFOQueueV2", vec![DType::I32]),
        ("RandomShuffleQueueV2", vec![DType::I32]),
        ("PriorityQueueV2", vec![DType::I64]),
    ] {
        filled(&format!("numbers that fill a {kind}"), &format!("'{kind} q'"), |g| {
            let queue = g.op(kind).name("q");
            let queue = match kind {
                "PriorityQueueV2" => queue.attr("shapes", vec![kolo::PartialShape::scalar()]),
                _ => queue,
            };
            let queue = queue.attr("component_types", vec![DType::I32]).out();
            forever(g, |i| {
                let many = numbers(i);
                let key = g.op("Cast").input(many).attr("DstT", DType::I64).out();
                let components = if dtypes[0] == DType::I64 { vec![key, many] } else { vec![many] };
                g.op("QueueEnqueueManyV2").input(queue).inputs(components).build()
            })
        });
    }
}

#[test]
fn tables_that_grow_are_refused() {
    let _turn = one_at_a_time();
    filled("a table that grows", "MutableHashTableV2 table", |g| {
        let table = g.op("MutableHashTableV2").name("table").attr("use_node_name_sharing", false);
        let table = table.attr("key_dtype", DType::I32).attr("value_dtype", DType::I32).out();
        forever(g, |i| g.op("LookupTableInsertV2").inputs([table, numbers(i), numbers(i)]).build())
    });
    filled("a table of text", "MutableHashTableV2 words", |g| {
        let table = g.op("MutableHashTableV2").name("words").attr("use_node_name_sharing", false);
        let table = table.attr("key_dtype", DType::I32).attr("value_dtype", DType::Str).out();
        forever(g, |i| g.op("LookupTableInsertV2").inputs([table, i, text(i)]).build())
    });
}

#[test]
fn stacks_stages_and_arrays_that_grow_are_refused() {
    let _turn = one_at_a_time();
    filled("a stack that is pushed to", "StackV2 stack", |g| {
        let stack = g.op("StackV2").name("stack").input(g.constant(-1)).attr("elem_type", DType::Str).out();
        forever(g, |i| g.op("StackPushV2").inputs([stack, text(i)]).build())
    });
    filled("a staging area", "area", |g| {
        let dtypes = vec![DType::Str];
        forever(g, |i| g.op("Stage").name("area").input(text(i)).attr("dtypes", dtypes).build())
    });
    filled("a tensor array of text", "TensorArray", |g| {
        let (handle, flow) = array_of(g, 0, DType::Str);
        forever(g, |i| g.op("TensorArrayWriteV3").inputs([handle, i, text(i), flow]).build())
    });
}

#[test]
fn gradients_that_pile_up_are_refused() {
    let _turn = one_at_a_time();
    filled("rows of gradients", "SparseConditionalAccumulator rows", |g| {
        let any = kolo::PartialShape::unknown();
        let rows = g.op("SparseConditionalAccumulator").name("rows").attr("dtype", DType::F32).attr("shape", any).out();
        forever(g, |i| {
            let indices = g.op("Cast").input(numbers(i)).attr("DstT", DType::I64).out();
            let values = g.op("Cast").input(numbers(i)).attr("DstT", DType::F32).out();
            let none = g.constant(Tensor::vector(Vec::<i64>::new()));
            let apply = g.op("SparseAccumulatorApplyGradient").inputs([rows, g.constant(0i64), indices, values, none]);
            apply.attr("has_known_shape", false).build()
        })
    });
}

/// A tensor of so many rows without elements, which takes no memory.
fn empty_rows(n: i32, value: Output<'_>) -> Output<'_> {
    let g = value.graph();
    g.op("Fill").input(g.constant([n, 0])).input(value).out()
}

/// What a kernel needs while it runs, where that has little to do with the size of its inputs and outputs.
#[test]
fn what_kernels_need_meanwhile_is_asked_for_before_it_is_taken() {
    let _turn = one_at_a_time();
    let victim = Victim::limited(MEGABYTES, &[]);
    const MANY: i32 = 1 << 30;
    let ints = |list: &[i64]| Tensor::vector(list.to_vec());
    exhausted(&victim, "an outer product whose sum is over nothing", |g| {
        let empty = || empty_rows(1 << 20, g.constant(1.0f32));
        g.op("Einsum").inputs([empty(), empty()]).attr("equation", "ij,kj->ik").out()
    });
    exhausted(&victim, "slices that are named by no coordinates", |g| {
        let empty = g.op("Fill").input(g.constant([0])).input(g.constant(1.0f32)).out();
        g.op("GatherNd").inputs([empty, empty_rows(MANY, g.constant(0i32))]).out()
    });
    exhausted(&victim, "a scalar that is set many times", |g| {
        let nowhere = g.op("Fill").input(g.constant([0])).input(g.constant(0i32)).out();
        let inputs = [empty_rows(MANY, g.constant(0i32)), nowhere, g.constant(1.0f32), g.constant(0.0f32)];
        g.op("SparseToDense").inputs(inputs).attr("validate_indices", false).out()
    });
    exhausted(&victim, "rows of which none has an element", |g| {
        let indices = g.op("Fill").input(g.constant([0, 1])).input(g.constant(0i64)).out();
        let values = g.op("Fill").input(g.constant([0])).input(g.constant(0.0f32)).out();
        let shape = g.constant(ints(&[1 << 30]));
        g.op("SparseFillEmptyRows").inputs([indices, values, shape, g.constant(0.0f32)]).build().output(1)
    });
    exhausted(&victim, "segments of rows without elements", |g| {
        let grad = empty_rows(MANY, g.constant(1.0f32));
        let none = g.op("Fill").input(g.constant([0])).input(g.constant(0i32)).out();
        g.op("SparseSegmentMeanGrad").inputs([grad, none, none, g.constant(1i32)]).out()
    });
    exhausted(&victim, "strings that are joined of nothing", |g| {
        g.op("ReduceJoin").inputs([empty_rows(MANY, g.constant("")), g.constant([1i32])]).out()
    });
    exhausted(&victim, "a text of one-byte words", |g| {
        let text = g.constant("x".repeat(40 << 20).as_str());
        let text = g.op("Reshape").inputs([text, g.constant([1])]).out();
        g.op("StringSplit").inputs([text, g.constant("")]).build().output(2)
    });
    exhausted(&victim, "numbers with many blanks", |g| {
        let numbers = g.op("Fill").input(g.constant([100_000])).input(g.constant(1i32)).out();
        g.op("AsString").input(numbers).attr("width", 60_000i64).out()
    });
    exhausted(&victim, "patches of a volume", |g| {
        let volume = g.op("Fill").input(g.constant([1, 64, 64, 64, 16])).input(g.constant(1.0f32)).out();
        let filter = g.op("Fill").input(g.constant([33, 33, 33, 16, 1])).input(g.constant(1.0f32)).out();
        let y = g.op("Conv3D").inputs([volume, filter]).attr("strides", vec![1i64; 5]).attr("padding", "SAME");
        y.out()
    });
    exhausted(&victim, "a temporary variable", |g| {
        let shape = kolo::PartialShape::from([1usize << 30]);
        let cell = g.op("TemporaryVariable").attr("shape", shape).attr("dtype", DType::F32).attr("var_name", "t").out();
        g.op("DestroyTemporaryVariable").input(cell).attr("var_name", "t").out()
    });
}

#[test]
fn an_answer_is_asked_for_before_it_is_taken() {
    let _turn = one_at_a_time();
    let victim = Victim::limited(MEGABYTES, &["--max-tensor-message", "64M"]);
    let error = refused(&victim, "an answer beyond the limit of messages", |g| {
        g.op("Fill").input(g.constant([1 << 25])).input(g.constant(1.0f32)).out()
    });
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(error.message().contains("the limit is"), "{error}");
    let error = refused(&victim, "text beyond the limit of messages", |g| {
        let text = g.constant("x".repeat(1 << 20).as_str());
        g.op("Fill").input(g.constant([128])).input(text).out()
    });
    assert!(error.message().contains("the limit is"), "{error}");

    // Within the limit of messages, but there is no room for the answer beside the tensor.
    let victim = Victim::limited(MEGABYTES + 500, &[]);
    let error = refused(&victim, "an answer without room", |g| {
        g.op("Fill").input(g.constant([200 << 20])).input(g.constant(1.0f32)).out()
    });
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
}

/// A counter that runs ahead of a value that never comes.
#[test]
fn iterations_in_flight_are_limited() {
    let _turn = one_at_a_time();
    let victim = Victim::limited(MEGABYTES, &[]);
    let g = kolo::graph();
    let queue = g.op("FIFOQueueV2").attr("component_types", vec![DType::F32]).out();
    let options = WhileOptions {
        parallel_iterations: i32::MAX.into(),
        // Nothing is known of what the queue gives.
        shape_invariants: vec![None, Some(kolo::PartialShape::unknown())],
        ..WhileOptions::default()
    };
    let never = g
        .while_loop(
            &[g.constant(0i32), g.constant(0.0f32)],
            |g, _| g.constant(true),
            |g, v| {
                let late = g.op("QueueDequeueV2").input(queue).attr("component_types", vec![DType::F32]).out();
                vec![v[0] + 1i32, v[1] + late]
            },
            options,
        )
        .unwrap()[0];
    let session = victim.connect(&g);
    let options = RunOptions { timeout: Some(Duration::from_secs(3)), ..RunOptions::default() };
    let error = session.run_with(&options, &[never], &[], &[]).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    victim.still_works();
}

/// One large step does not hold the memory for ever.
#[test]
fn memory_goes_back_to_the_system() {
    let _turn = one_at_a_time();
    let victim = Victim::new(&[]);
    victim.still_works();
    let before = victim.process.resident_kb();
    let g = kolo::graph();
    let large = g.op("Fill").input(g.constant([1 << 28])).input(g.constant(1.0f32)).out();
    let most = g.op("Max").input(large).input(g.constant(0i32)).out();
    assert_eq!(victim.connect(&g).fetch(most).unwrap(), Tensor::scalar(1.0f32));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let more = victim.process.resident_kb().saturating_sub(before) >> 10;
        if more < 200 {
            return;
        }
        assert!(Instant::now() < deadline, "{more} MB are still there");
        std::thread::sleep(Duration::from_millis(100));
    }
}

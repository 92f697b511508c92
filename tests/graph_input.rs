//! Input that is itself a graph, as TensorFlow 1's programs have it, and what several threads share through a session.

use std::path::PathBuf;
use std::sync::Arc;

use kolo::{AttrValue, Code, DType, Session, Tensor, ops};

fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("graph-input-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("the target directory can be written");
    path
}

#[test]
fn names_wait_in_a_queue_and_lines_are_parsed() {
    let dir = folder("csv");
    for (file, lines) in [("a.csv", "x,y\n1.5,2\n2.5,3\n"), ("b.csv", "x,y\n"), ("c.csv", "x,y\n4,5\n")] {
        std::fs::write(dir.join(file), lines).unwrap();
    }
    let g = kolo::graph();
    let pattern = dir.join("*.csv").to_str().unwrap().to_owned();
    let names = ops::matching_files(g.constant(Tensor::string(pattern)));
    let queue = g.op("FIFOQueueV2").attr("component_types", vec![DType::Str]).out();
    let fill = g.op("QueueEnqueueManyV2").inputs([queue, names]).build();
    let close = g.op("QueueCloseV2").input(queue).control_input(fill).build();
    let reader = g.op("TextLineReaderV2").attr("skip_header_lines", 1i64).out();
    let line = g.op("ReaderReadV2").inputs([reader, queue]).build().output(1);
    let columns = ops::decode_csv(line, &[g.constant([0.0f32]), g.constant([0i32])]);
    let session = Session::new(&g).unwrap();
    session.run_op(close).unwrap();
    let mut seen = Vec::new();
    let end = loop {
        match session.run(&columns, &[], &[]) {
            Ok(found) => {
                seen.push((found[0].scalar_value::<f32>().unwrap(), found[1].scalar_value::<i32>().unwrap()));
            }
            Err(error) => break error,
        }
    };
    assert_eq!(seen, [(1.5, 2), (2.5, 3), (4.0, 5)]);
    assert_eq!(end.code(), Code::OutOfRange);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn many_readers_of_one_reader_get_each_line_once() {
    let dir = folder("lines");
    let lines: Vec<String> = (0..200).map(|i| i.to_string()).collect();
    std::fs::write(dir.join("f"), lines.join("\n")).unwrap();
    let g = kolo::graph();
    let queue = g.op("FIFOQueueV2").attr("component_types", vec![DType::Str]).out();
    let name = g.constant(Tensor::string(dir.join("f").to_str().unwrap().to_owned()));
    let fill = g.op("QueueEnqueueV2").inputs([queue, name]).build();
    let close = g.op("QueueCloseV2").input(queue).control_input(fill).build();
    let reader = g.op("TextLineReaderV2").out();
    let line = g.op("ReaderReadV2").inputs([reader, queue]).build().output(1);
    let number = ops::string_to_number(line, DType::I32);
    let session = Arc::new(Session::new(&g).unwrap());
    session.run_op(close).unwrap();
    let read = session.make_callable(&[], &[number], &[]).unwrap();
    let mut all: Vec<i32> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut seen = Vec::new();
                    while let Ok(found) = read.call(&[]) {
                        seen.push(found[0].scalar_value::<i32>().unwrap());
                    }
                    seen
                })
            })
            .collect();
        readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect()
    });
    all.sort_unstable();
    assert_eq!(all, (0..200).collect::<Vec<i32>>());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_mutex_of_the_graph_keeps_steps_apart() {
    let g = kolo::graph();
    let v = g.variable("v", 0.0f32);
    let mutex = g.op("MutexV2").out();
    let lock = g.op("MutexLock").input(mutex).out();
    // Reading and writing apart would lose steps of others, were it not for the lock.
    let assign = g.control_dependencies(&[lock.operation()], || {
        let next = v.read_now() + 1.0;
        g.op("AssignVariableOp").inputs([v.handle(), next]).build()
    });
    let unlock = g.op("ConsumeMutexLock").input(lock).control_input(assign).build();
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::new(&g).unwrap());
    session.run_op(init).unwrap();
    let step = session.make_callable(&[], &[], &[unlock]).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| drop(step.call(&[]).unwrap())));
        }
    });
    assert_eq!(session.fetch(v.read()).unwrap(), Tensor::scalar(200.0f32));
}

#[test]
fn one_step_fills_what_another_takes() {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", kolo::PartialShape::scalar());
    let attr = |name: &str| AttrValue::from(name);
    let stage = g.op("Stage").input(x).attr("shared_name", attr("area")).attr("capacity", 2i64).build();
    let unstage = g.op("Unstage").attr("dtypes", vec![DType::F32]).attr("shared_name", attr("area"));
    let unstage = unstage.attr("capacity", 2i64).out();
    let session = Arc::new(Session::new(&g).unwrap());
    let put = session.make_callable(&[x], &[], &[stage]).unwrap();
    let sum: f32 = std::thread::scope(|scope| {
        // More than there is room for: one waits for the other, in turns.
        scope.spawn(|| (0..20).for_each(|i| drop(put.call(&[&Tensor::scalar(i as f32)]).unwrap())));
        (0..20).map(|_| session.fetch(unstage).unwrap().scalar_value::<f32>().unwrap()).sum()
    });
    assert_eq!(sum, 190.0);
}

#[test]
fn a_table_is_shared_by_steps_and_an_op_without_a_kernel_is_refused() {
    let g = kolo::graph();
    let words = |list: &[&'static str]| {
        g.constant(Tensor::from_strings([list.len()], list.iter().map(|&word| word.into()).collect()).unwrap())
    };
    let (table, fill) = ops::hash_table(words(&["cat", "dog"]), g.constant([7i64, 8]));
    let found = ops::lookup_table_find(table, words(&["dog", "cow"]), g.constant(-1i64));
    let decoded = g.op("DecodeJpeg").input(g.constant("a picture")).out();
    let session = Session::new(&g).unwrap();
    session.run_op(fill).unwrap();
    assert_eq!(session.fetch(found).unwrap(), Tensor::from([8i64, -1]));
    let error = session.fetch(decoded).unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.to_string().contains("No OpKernel was registered to support Op 'DecodeJpeg'"), "{error}");
}

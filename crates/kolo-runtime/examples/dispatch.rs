//! scratch
use kolo_core::Tensor;
use kolo_runtime::Session;
use std::sync::Arc;
use std::time::Instant;
fn main() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [0usize; 0]);
    let one = g.constant(1.0f32);
    let y = (0..10_000).fold(x, |y, _| y + one);
    let ops: Vec<_> = (0..10_000).map(|_| (x + one).operation()).collect();
    let fan = g.group("fan", &ops);
    let c = g.constant(3.0f32);
    let add = x + one;
    let session = Arc::new(Session::new(&g).unwrap());
    let v = Tensor::scalar(1.0f32);
    for (name, call) in [
        ("chain", session.make_callable(&[x], &[], &[y.operation()]).unwrap()),
        ("fan", session.make_callable(&[x], &[], &[fan]).unwrap()),
    ] {
        let mut best = f64::MAX;
        for _ in 0..200 {
            let t = Instant::now();
            call.call(&[&v]).unwrap();
            best = best.min(t.elapsed().as_secs_f64());
        }
        println!("{name} {:.1} ns/node", best * 1e9 / 1e4);
    }
    for _ in 0..3 {
        let n = 200_000;
        let t = Instant::now();
        for _ in 0..n {
            session.run(&[c], &[], &[]).unwrap();
        }
        print!("const {:.0} ns  ", t.elapsed().as_secs_f64() * 1e9 / n as f64);
        let t = Instant::now();
        for _ in 0..n {
            session.run(&[add], &[(x, v.clone())], &[]).unwrap();
        }
        println!("feed-add {:.0} ns", t.elapsed().as_secs_f64() * 1e9 / n as f64);
    }
}

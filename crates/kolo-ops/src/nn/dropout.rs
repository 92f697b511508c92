//! Dropout (Srivastava et al., 2014), composed of other ops.

use kolo_graph::Output;

use crate::random::standard::random_uniform;

/// `x` with elements set to zero at random, each with probability `rate`, and the others scaled up so that the expected
/// sum stays. With `rate` 0 it is `x` itself.
#[track_caller]
pub fn dropout(x: Output<'_>, rate: f64, seed: Option<i64>) -> Output<'_> {
    if rate == 0.0 {
        return x;
    }
    let graph = x.graph();
    graph.name_scope("dropout", || {
        let keep = 1.0 - rate;
        let shape = graph.op("Shape").input(x).out();
        // 1 with probability `keep`, else 0.
        let kept = graph.op("Floor").input(random_uniform(shape, x.dtype(), seed) + keep).out();
        x / keep * kept
    })
}

#[cfg(test)]
mod tests {
    use crate::testing::{evaluate, tensor};

    #[test]
    fn elements_are_dropped_or_scaled() {
        let g = crate::graph();
        let x = g.constant(tensor([1000], vec![3.0f32; 1000]));
        let y = super::dropout(x, 0.25, Some(7));
        let found = evaluate(&g, &[y], &[]).unwrap();
        let found = found[0].data::<f32>().unwrap();
        let kept = found.iter().filter(|&&y| y == 4.0).count();
        assert!(found.iter().all(|&y| y == 0.0 || y == 4.0));
        assert!((700..800).contains(&kept), "kept {kept} of 1000");
        assert_eq!(super::dropout(x, 0.0, None), x);
    }
}

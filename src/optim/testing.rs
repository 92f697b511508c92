//! What the optimizers' tests share: three steps on a small problem with a dense and a sparse gradient, for both families of
//! variables.

use kolo_core::Tensor;
use kolo_graph::{Graph, Output, Variable, VariableKind};
use kolo_runtime::Session;

use super::Optimizer;
use crate::{ops, train};

/// A vector `w` with loss Σ c·w²/2, whose gradient is c·w, and a table `e` of which rows 0, 2 and again 0 are looked up, with
/// a loss of the same form.
pub fn problem(g: &Graph, kind: VariableKind) -> (Variable<'_>, Variable<'_>, Output<'_>) {
    let w = g.new_variable("w", [1.0f32, -2.0, 0.5]).kind(kind).build();
    let e = g.new_variable("e", [[1.0f32, -2.0], [0.5, 3.0], [4.0, -5.0], [-1.0, 0.25]]).kind(kind).build();
    let ids = g.constant([0i32, 2, 0]);
    let rows = match kind {
        VariableKind::Resource => ops::resource_gather(e.handle(), ids),
        VariableKind::Reference => ops::gather(e.read(), ids, 0),
    };
    let dense = g.constant([0.3f32, -0.7, 0.9]) * ops::square(w.read());
    let sparse = g.constant([[0.3f32, -0.7], [0.9, 0.2], [-0.4, 0.6]]) * ops::square(rows);
    (w, e, (ops::sum_all(dense) + ops::sum_all(sparse)) / 2.0)
}

/// Checks `w` after each of three steps, and `e` and the slots after the last.
#[track_caller]
pub fn check<O: Optimizer>(make: impl Fn() -> O, dense: [[f32; 3]; 3], sparse: [f32; 8], slots: &[(&str, &[f32])]) {
    for kind in [VariableKind::Resource, VariableKind::Reference] {
        let g = kolo_ops::graph();
        let (w, e, loss) = problem(&g, kind);
        let step = train::global_step_or_create(&g).expect("a global step");
        let optimizer = make();
        let train = optimizer.minimize(loss, Some(step)).expect("minimize");
        let init = g.global_variables_initializer();
        let session = Session::new(&g).expect("a session");
        session.run_op(init).expect("init");
        for expected in dense {
            session.run_op(train).expect("a step");
            close(&session.fetch(w.read()).expect("w"), &expected, &format!("{kind:?} w"));
        }
        close(&session.fetch(e.read()).expect("e"), &sparse, &format!("{kind:?} e"));
        for (name, expected) in slots {
            let slot = g.find_variable(name).expect("a slot of that name");
            close(&session.fetch(slot.read()).expect("slot"), expected, &format!("{kind:?} {name}"));
        }
        let names = optimizer.slot_names();
        assert!(names.is_empty() || names.iter().any(|name| optimizer.get_slot(w, name).is_some()));
        let step = session.fetch(step.read()).expect("step").scalar_value::<i64>().expect("an int64");
        assert_eq!(step, 3);
    }
}

/// Equal but for what the order of roundings may do.
#[track_caller]
pub fn close(found: &Tensor, expected: &[f32], what: &str) {
    let found = found.data::<f32>().expect("floats");
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found_at, expected_at) in found.iter().zip(expected) {
        let tolerance = 2e-6 * expected_at.abs().max(1e-3);
        assert!((found_at - expected_at).abs() <= tolerance, "{what}: {found:?} is not {expected:?}");
    }
}

//! Control dependencies that really order: a read before and a read after an update, in one run.
//!
//! ```text
//! $ cargo run --example control_dependencies
//! before = 1, after = 11
//! before = 11, after = 21
//! ```

use kolo::{Result, Session};

fn main() -> Result<()> {
    let g = kolo::graph();
    let v = g.variable("v", 1.0f32);
    let before = v.read_now();
    // The update waits for the first read, the second read for the update.
    let update = g.control_dependencies(&[before.operation()], || v.assign_add(g.constant(10.0f32)));
    let after = g.control_dependencies(&[update], || v.read_now());
    let init = g.global_variables_initializer();

    let session = Session::new(&g)?;
    session.run_op(init)?;
    for _ in 0..2 {
        let values = session.run(&[before, after], &[], &[])?;
        println!("before = {}, after = {}", values[0].scalar_value::<f32>()?, values[1].scalar_value::<f32>()?);
    }
    Ok(())
}

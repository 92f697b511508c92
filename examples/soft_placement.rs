//! Soft placement and its refusal: an integer variable pinned to a device that has no kernel for it.
//!
//! ```text
//! $ cargo run --example soft_placement
//! strict: Cannot assign a device to node 'count': Could not satisfy explicit device specification '/device:GPU:0' because
//!         no supported kernel for GPU devices is available: VariableV2 of int32 has kernels for: CPU; devices that can run
//!         it: /job:localhost/replica:0/task:0/device:CPU:0 (pinned at examples/soft_placement.rs:16)
//! soft:   count = int32[] [3] on /job:localhost/replica:0/task:0/device:CPU:0, 2 nodes fell back
//! ```

use kolo::{DeviceName, NullDevice, Result, Session, SessionConfig, VariableKind};

fn main() -> Result<()> {
    let g = kolo::graph();
    // 3 is an integer, 3.0 would be a float: the pinned device has kernels for floats only.
    let count = g.device("/gpu:0", || g.new_variable("count", 3i32).kind(VariableKind::Reference).build());
    let init = g.global_variables_initializer();

    // A stand-in for a GPU that refuses variables, so that this runs on any machine.
    let gpu = || NullDevice::new(DeviceName::local("GPU", 0), None, &["VariableV2", "Assign", "Identity", "Const"]);
    let config =
        |soft| SessionConfig { extra_devices: vec![gpu()], allow_soft_placement: soft, ..SessionConfig::default() };

    let refusal = Session::with_config(&g, config(false))?.run_op(init).expect_err("the pin cannot be kept");
    println!("strict: {}", refusal.message());

    let session = Session::with_config(&g, config(true))?;
    session.run_op(init)?;
    let value = session.fetch(count.read())?;
    let report = session.local()?.placement();
    let row = report.rows.iter().find(|row| row.node == "count").expect("it was placed");
    println!("soft:   count = {value:?} on {}, {} nodes fell back", row.device, report.n_fallbacks);
    Ok(())
}

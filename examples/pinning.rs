//! Pinning and default placement: a variable and a constant on `/cpu:0`, their product elsewhere, the sum wherever the
//! placer puts it.
//!
//! ```text
//! $ cargo run --example pinning
//! a: (Const): /job:localhost/replica:0/task:0/device:CPU:0, because: pinned, moves 24 bytes
//! b: (VarHandleOp): /job:localhost/replica:0/task:0/device:CPU:0, because: pinned, moves 0 bytes
//! product: (MatMul): /job:localhost/replica:0/task:0/device:CPU:1, because: pinned, moves 16 bytes
//! sum: (Sum): /job:localhost/replica:0/task:0/device:CPU:0, because: no accelerator has a kernel, moves 0 bytes
//! sum = 163
//! ```

use std::collections::BTreeMap;

use kolo::{Result, Session, SessionConfig};

fn main() -> Result<()> {
    let g = kolo::graph();
    let (a, b) = g.device("/cpu:0", || {
        let a = g.named_constant("a", [[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let b = g.variable("b", [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]]);
        (a, b)
    });
    // Another CPU device, so that this runs on any machine.
    let product = g.device("/cpu:1", || g.op("MatMul").name("product").input(a).input(b.read()).out());
    let sum = g.op("Sum").name("sum").input(product).input(g.constant([0i32, 1])).out();
    let init = g.global_variables_initializer();

    let config = SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), 2)]), ..SessionConfig::default() };
    let session = Session::with_config(&g, config)?;
    session.run_op(init)?;
    let value = session.fetch(sum)?.scalar_value::<f32>()?;

    for row in session.local()?.placement().rows {
        if ["a", "b", "product", "sum"].contains(&row.node.as_str()) {
            println!("{}, because: {}, moves {} bytes", row.log_line(), row.rule, row.n_bytes_moved.unwrap_or(0));
        }
    }
    println!("sum = {value}");
    Ok(())
}

//! Pinning and default placement: a variable and a constant on `/cpu:0`, the product wherever the placer puts it.
//!
//! ```text
//! $ cargo run --example pinning
//! node                     op              wish           device                                         rule                 bytes moved
//! a                        Const           /device:CPU:0  /job:localhost/replica:0/task:0/device:CPU:0  pinned               24
//! b                        VarHandleOp     /device:CPU:0  /job:localhost/replica:0/task:0/device:CPU:0  pinned               0
//! b/Read/ReadVariableOp    ReadVariableOp  -              /job:localhost/replica:0/task:0/device:CPU:0  with the node it …   24
//! product                  MatMul          /device:CPU:1  /job:localhost/replica:0/task:0/device:CPU:1  pinned               0
//! product = float[2,2] [22.0, 28.0, 49.0, 64.0]
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
    // Another CPU device stands in for an accelerator here.
    let product = g.device("/cpu:1", || g.op("MatMul").name("product").input(a).input(b.read()).out());
    let init = g.global_variables_initializer();

    let config = SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), 2)]), ..SessionConfig::default() };
    let session = Session::with_config(&g, config)?;
    session.run_op(init)?;
    let value = session.fetch(product)?;

    let mut report = session.placement();
    report.rows.retain(|row| ["a", "b", "b/Read/ReadVariableOp", "product"].contains(&row.node.as_str()));
    print!("{report}");
    println!("product = {value:?}");
    Ok(())
}

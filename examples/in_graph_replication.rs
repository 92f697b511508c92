//! In-graph replication: a batch split over three devices, one matrix product on each, joined again.
//!
//! ```text
//! $ cargo run --example in_graph_replication
//! MatMul: (MatMul): /job:localhost/replica:0/task:0/device:CPU:0
//! MatMul_1: (MatMul): /job:localhost/replica:0/task:0/device:CPU:1
//! MatMul_2: (MatMul): /job:localhost/replica:0/task:0/device:CPU:2
//! float[6,1] [1.0, 5.0, 9.0, 13.0, 17.0, 21.0]
//! ```

use std::collections::BTreeMap;

use kolo::{Result, Session, SessionConfig, Tensor, ops};

const REPLICAS: usize = 3;

fn main() -> Result<()> {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [Some(6), Some(2)]);
    let w = g.variable("w", [[1.0f32], [1.0]]);
    let shards = g.device("/cpu:0", || ops::split(x, REPLICAS, 0));
    let products: Vec<_> = shards
        .iter()
        .enumerate()
        .map(|(i, &shard)| g.device(&format!("/cpu:{i}"), || ops::matmul(shard, w.read())))
        .collect();
    let joined = g.device("/cpu:0", || ops::concat(&products, 0));
    let init = g.global_variables_initializer();

    let config =
        SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), REPLICAS)]), ..SessionConfig::default() };
    let session = Session::with_config(&g, config)?;
    session.run_op(init)?;
    let batch = Tensor::from_vec([6, 2], (0..12).map(|i| i as f32).collect())?;
    let value = session.run(&[joined], &[(x, batch)], &[])?;
    for row in session.local()?.placement().rows.iter().filter(|row| row.op == "MatMul") {
        println!("{}", row.log_line());
    }
    println!("{:?}", value[0]);
    Ok(())
}

//! A small training that TensorBoard can show: the loss and the weights as they change, a picture, a text, the graph.
//!
//! ```text
//! $ cargo run --example tensorboard_events -- /tmp/events
//! step 0 loss 9.5 weights 0 0 0
//! step 1 loss 3.65625 weights 1.25 0 1.75
//! …
//! step 19 loss 0.00011620954 weights 1.9957718 -2.9830868 3.9873152
//! $ tensorboard --logdir /tmp/events
//! ```

use kolo::train::summary::{self, FileWriter, SessionStatus};
use kolo::{Error, Grad, Initializer, Result, RunOptions, Session, Tensor, gradients, ops};

fn main() -> Result<()> {
    // The folder that is named, else one among the system's temporary files.
    let dir = std::env::args().nth(1).map_or_else(|| std::env::temp_dir().join("kolo-events"), Into::into);

    // y = 2 a - 3 b + 4 c, from four points.
    let g = kolo::graph();
    let x = g.constant([[1.0f32, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]);
    let y = g.constant([[2.0f32], [-3.0], [4.0], [3.0]]);
    let w = g.new_variable("w", Initializer::Zeros).shape([3, 1]).build();
    let loss = ops::mean_all(ops::squared_difference(ops::matmul(x, w.read()), y));
    let Some(gradient) = gradients(&[loss], &[w.handle()])?[0] else {
        return Err(Error::internal("the loss depends on w"));
    };
    let gradient = Grad::dense(gradient)?;
    let train = ops::apply_gradient_descent(w.handle(), g.constant(0.5f32), gradient);

    // What to show. Each has its name in the scopes around it, as in TensorFlow.
    g.name_scope("train", || {
        summary::scalar("loss", loss);
        summary::histogram("weights", w.read());
        summary::histogram("gradient", gradient);
    });
    // Twelve shades of grey, from black to white.
    let shades = g.constant(Tensor::from_vec([1, 3, 4, 1], (0..12).map(|i| i as f32 / 11.0).collect())?);
    summary::image("shades", shades);
    summary::text("about", g.constant("a line through **four** points"));
    let summaries = summary::merge_all(&g).ok_or_else(|| Error::internal("there are summaries"))?;
    let init = g.global_variables_initializer();

    let writer = FileWriter::new(&dir)?;
    writer.add_graph(&g)?;
    writer.add_session_log(SessionStatus::Start, "", 0);
    let session = Session::new(&g)?;
    session.run_op(init)?;
    for step in 0..20 {
        let values = session.run(&[summaries, loss, w.read()], &[], &[])?;
        writer.add_summary(&values[0], step)?;
        // A number that no op computes.
        writer.add_scalar("progress", (step + 1) as f64 / 20.0, step);
        let weights: Vec<String> = values[2].data::<f32>()?.iter().map(|w| w.to_string()).collect();
        println!("step {step} loss {} weights {}", values[1].scalar_value::<f32>()?, weights.join(" "));
        session.run_op(train)?;
    }
    let trace = RunOptions { trace: true, ..RunOptions::default() };
    let (_, metadata) = session.run_with(&trace, &[loss], &[], &[])?;
    writer.add_run_metadata("last step", &metadata, 20);
    writer.close()
}

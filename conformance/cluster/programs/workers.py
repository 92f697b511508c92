"""Between-graph replication: two worker programs and the parameter servers, with Supervisor and MonitoredTrainingSession."""

import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

from harness import case, check, close

from programs import _mnist


def setter(context):
    return tf.train.replica_device_setter(worker_device=f"/job:worker/task:{context.rank}", cluster=context.spec)


def config_of(context):
    return context.config(device_filters=["/job:ps", f"/job:worker/task:{context.rank}"])


def events_of(folder):
    found = []
    for name in sorted(os.listdir(folder)):
        if "tfevents" in name:
            try:
                for event in tf.train.summary_iterator(os.path.join(folder, name)):
                    found.append(event)
            # The last record of a file that is still being written.
            except tf.errors.DataLossError:
                pass
    return found


def scalars(folder, tag):
    return [(e.step, v.simple_value) for e in events_of(folder) for v in e.summary.value if v.tag == tag]


def learned(context, path):
    """The accuracy of a checkpoint, by a plain local session."""
    images, labels = _mnist.load(context.data)
    with tf.Graph().as_default():
        model = _mnist.Mlp()
        with tf.Session() as s:
            tf.train.Saver(tf.trainable_variables()).restore(s, path)
            return float(s.run(model.accuracy, {model.x: images[:2000], model.y: labels[:2000]}))


# --- Supervisor -------------------------------------------------------------------------------------------------------

def supervised(context, synchronous, steps):
    """The distributed MNIST program of the tutorials."""
    chief = context.rank == 0
    images, labels = _mnist.load(context.data)
    with tf.device(setter(context)):
        step = tf.Variable(0, name="global_step", trainable=False, dtype=tf.int64)
        model = _mnist.Mlp()
        optimizer = tf.train.AdamOptimizer(0.005)
        if synchronous:
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2, total_num_replicas=2)
        train = optimizer.minimize(model.loss, global_step=step)
        tf.summary.scalar("train_loss", model.loss)
        tf.summary.scalar("train_accuracy", model.accuracy)
        merged = tf.summary.merge_all()
        local_init, ready_for_local = None, None
        if synchronous:
            local_init = optimizer.chief_init_op if chief else optimizer.local_step_init_op
            ready_for_local = optimizer.ready_for_local_init_op
            runner, tokens = optimizer.get_chief_queue_runner(), optimizer.get_init_tokens_op()
        init = tf.global_variables_initializer()
    options = dict(is_chief=chief, logdir=context.path("log"), init_op=init, summary_op=None, saver=tf.train.Saver(), global_step=step,
                   save_model_secs=600, recovery_wait_secs=1, stop_grace_secs=2)
    if synchronous:
        options.update(local_init_op=local_init, ready_for_local_init_op=ready_for_local)
    supervisor = tf.train.Supervisor(**options)
    mine, losses = 0, []
    s = supervisor.prepare_or_wait_for_session(context.master, config=config_of(context))
    if synchronous and chief:
        supervisor.start_queue_runners(s, [runner])
        s.run(tokens)
    if synchronous:
        # A worker that waits for its chief looks once a second, and a fast chief would have done all steps by then.
        context.meet("begin")
    data = _mnist.batches(images, labels, 100, context.rank)
    now = 0
    while not supervisor.should_stop() and now < steps:
        x, y = next(data)
        _, now, loss = s.run([train, step, model.loss], {model.x: x, model.y: y})
        losses.append(loss)
        mine += 1
        if chief and mine % 20 == 0:
            supervisor.summary_computed(s, s.run(merged, {model.x: x, model.y: y}))
    if chief:
        context.wait_for("worker-done")
        path = supervisor.saver.save(s, context.path("log", "model.ckpt"), global_step=step)
        final = int(s.run(step))
    else:
        context.tell("worker-done")
    # Before the session is closed: the thread that makes the tokens waits in it, and its error would be raised here.
    supervisor.stop(ignore_live_threads=True)
    s.close()
    check(mine > 0, "this worker did no step")
    if chief:
        check(final >= steps, "the global step is", final)
        accuracy = learned(context, path)
        check(accuracy > 0.85, "the accuracy is", accuracy)
        check(len(scalars(context.path("log"), "train_loss")) >= 1, "no summary was written")
        check(any(e.HasField("graph_def") for e in events_of(context.path("log"))), "the graph was not written")
    return mine, losses


@case("supervisor-async", seconds=120, ranks=2)
def supervisor_async(context):
    supervised(context, False, 300)
    context.meet("end")


@case("supervisor-sync", seconds=120, ranks=2)
def supervisor_sync(context):
    mine, _ = supervised(context, True, 150)
    context.meet("end")
    # Two gradients make a step, and a worker may give both of some.
    check(mine >= 20, "of 150 steps this worker took part in", mine)


@case("supervisor-managed-session", seconds=90)
def managed(context):
    """managed_session with a saver and summaries of its own threads, then a second run that finds the checkpoint."""
    def program():
        with tf.device("/job:ps/task:0"):
            step = tf.train.get_or_create_global_step()
            up = tf.assign_add(step, 1)
            tf.summary.scalar("step", tf.cast(step, tf.float32))
        supervisor = tf.train.Supervisor(logdir=context.path("log"), global_step=step, save_summaries_secs=1, save_model_secs=1)
        with supervisor.managed_session(context.master, config=context.config()) as s:
            first = int(s.run(step))
            begin = time.monotonic()
            while not supervisor.should_stop():
                now = int(s.run(up))
                latest = tf.train.latest_checkpoint(context.path("log"))
                # Long enough for the threads that save and summarise once a second.
                if (latest and not latest.endswith("-0") and time.monotonic() > begin + 2.5) or time.monotonic() > begin + 15:
                    break
                time.sleep(0.05)
        return first, now

    first, last = program()
    check(first == 0 and tf.train.latest_checkpoint(context.path("log")), "no checkpoint")
    check(scalars(context.path("log"), "step"), "no summary")
    saved = int(tf.train.load_checkpoint(context.path("log")).get_tensor("global_step"))
    check(0 < saved <= last, saved, last)
    with tf.Graph().as_default() as g, g.container("workers-managed-again"):
        first, _ = program()
    check(first >= saved, "the second run began at", first, "instead of", saved)


# --- MonitoredTrainingSession -----------------------------------------------------------------------------------------

class Count(tf.train.SessionRunHook):
    """Counts what a hook is called with."""

    def __init__(self):
        self.created = self.before = self.after = self.ended = 0

    def after_create_session(self, session, coord):
        self.created += 1

    def before_run(self, run_context):
        self.before += 1

    def after_run(self, run_context, run_values):
        self.after += 1

    def end(self, session):
        self.ended += 1


def monitored(context, synchronous, steps, make=lambda: tf.train.GradientDescentOptimizer(0.3), resource=False):
    chief = context.rank == 0
    images, labels = _mnist.load(context.data)
    with tf.device(setter(context)), tf.variable_scope("", use_resource=resource):
        step = tf.train.get_or_create_global_step()
        model = _mnist.Mlp()
        optimizer = make()
        hooks = [tf.train.StopAtStepHook(last_step=steps), Count(), tf.train.LoggingTensorHook({"loss": model.loss}, every_n_iter=50),
                 tf.train.NanTensorHook(model.loss)]
        if synchronous:
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, 2, 2)
            hooks.append(optimizer.make_session_run_hook(chief))
        train = optimizer.minimize(model.loss, step)
        tf.summary.scalar("train_loss", model.loss)
        merged = tf.summary.merge_all()
    chief_only = []
    log = context.path("log")
    if chief:
        # A gradient of both workers is in the graph once the chief's session is there.
        chief_only = [tf.train.CheckpointSaverHook(log, save_steps=50), tf.train.SummarySaverHook(20, output_dir=log, summary_op=merged),
                      tf.train.StepCounterHook(25, output_dir=log)]
    else:
        # A worker that finds no initialised variables sleeps for 30 seconds.
        context.wait_for("chief-ready")
    mine, loss = 0, None
    data = _mnist.batches(images, labels, 100, context.rank)
    with tf.train.MonitoredTrainingSession(
            master=context.master, is_chief=chief, hooks=hooks, chief_only_hooks=chief_only, config=config_of(context),
            checkpoint_dir=log, save_checkpoint_secs=None, save_checkpoint_steps=None, save_summaries_steps=None, save_summaries_secs=None,
            stop_grace_period_secs=2) as s:
        if chief:
            context.tell("chief-ready")
            context.wait_for("worker-ready")
        else:
            context.tell("worker-ready")
        while not s.should_stop():
            x, y = next(data)
            _, loss, now = s.run([train, model.loss, step], {model.x: x, model.y: y})
            mine += 1
        if chief:
            # The chief's session ends last: in synchronous training its thread makes the others' tokens.
            context.wait_for("worker-done")
    if not chief:
        context.tell("worker-done")
    counter = hooks[1]
    check(mine > 0, "this worker did no step")
    check(counter.created == 1 and counter.ended == 1 and counter.before == counter.after == mine, vars(counter), mine)
    context.meet("both-done")
    if chief:
        latest = tf.train.latest_checkpoint(log)
        check(latest is not None, "no checkpoint")
        saved = int(tf.train.load_checkpoint(latest).get_tensor("global_step"))
        check(saved >= steps, "the last checkpoint is of step", saved)
        accuracy = learned(context, latest)
        check(accuracy > 0.8, "the accuracy is", accuracy)
        check(scalars(log, "train_loss"), "no summary")
        check(scalars(log, "global_step/sec"), "no steps per second")
    context.meet("end")


@case("monitored-async", seconds=120, ranks=2)
def monitored_async(context):
    monitored(context, False, 300)


@case("monitored-async-resource", seconds=120, ranks=2)
def monitored_async_resource(context):
    monitored(context, False, 200, lambda: tf.train.MomentumOptimizer(0.1, 0.9), resource=True)


@case("monitored-sync", seconds=120, ranks=2)
def monitored_sync(context):
    monitored(context, True, 120)


@case("monitored-sync-adam-resource", seconds=120, ranks=2)
def monitored_sync_adam(context):
    monitored(context, True, 100, lambda: tf.train.AdamOptimizer(0.005), resource=True)


@case("sync-equals-one-big-batch", seconds=90, ranks=2)
def sync_equals(context):
    """Synchronous training with the halves of a batch is training with the batch."""
    chief = context.rank == 0
    rng = np.random.default_rng(4)
    xs, ys = rng.standard_normal((8, 20, 3)).astype(np.float32), rng.standard_normal((8, 20, 1)).astype(np.float32)

    def model():
        x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        w = tf.get_variable("w", initializer=np.zeros((3, 1), np.float32), use_resource=False)
        return x, y, w, tf.reduce_mean(tf.square(tf.matmul(x, w) - y))

    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        x, y, w, loss = model()
        optimizer = tf.train.SyncReplicasOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), 2, 2)
        train = optimizer.minimize(loss, step)
    if not chief:
        context.wait_for("chief-ready")
    half = slice(0, 10) if chief else slice(10, 20)
    # No tokens in advance: with them the fast worker may give two gradients for one step.
    hook = optimizer.make_session_run_hook(chief, num_tokens=0)
    with tf.train.MonitoredTrainingSession(context.master, chief, hooks=[hook], config=config_of(context), stop_grace_period_secs=2) as s:
        context.tell("chief-ready") if chief else None
        for i in range(8):
            s.run(train, {x: xs[i, half], y: ys[i, half]})
        context.meet("trained")
        got, at = s.run([w, step])
        context.meet("read")
    with tf.Graph().as_default():
        x, y, w, loss = model()
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        with tf.Session() as s:
            s.run(tf.global_variables_initializer())
            for i in range(8):
                s.run(train, {x: xs[i], y: ys[i]})
            wanted = s.run(w)
    check(at == 8, "the global step is", at)
    close(got, wanted, "w", rtol=1e-4, atol=1e-6)
    context.meet("end")


@case("sync-embedding", seconds=90, ranks=2)
def sync_embedding(context):
    """Sparse gradients in the accumulators."""
    chief = context.rank == 0
    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        ids, y = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None])
        table = tf.get_variable("table", [10, 2], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1) - y))
        optimizer = tf.train.SyncReplicasOptimizer(tf.train.AdagradOptimizer(0.5), 2, 2)
        train = optimizer.minimize(loss, step)
    if not chief:
        context.wait_for("chief-ready")
    hooks = [optimizer.make_session_run_hook(chief, num_tokens=0)]
    with tf.train.MonitoredTrainingSession(context.master, chief, hooks=hooks, config=config_of(context), stop_grace_period_secs=2) as s:
        context.tell("chief-ready") if chief else None
        losses = [s.run([loss, train], {ids: np.arange(5) + 5 * context.rank, y: np.arange(5, dtype=np.float32)})[0] for _ in range(15)]
        context.meet("trained")
    check(losses[-1] < 0.3 * losses[0], losses[0], losses[-1])
    context.meet("end")


@case("worker-waits-for-the-chief", seconds=90, ranks=2)
def waits(context):
    """A worker that starts first finds nothing initialised, asks again, and trains when the chief has come."""
    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        up = tf.assign_add(step, 1)
    manager = tf.train.SessionManager(ready_op=tf.report_uninitialized_variables(), recovery_wait_secs=1)
    if context.rank == 1:
        context.tell("worker-started")
        s = manager.wait_for_session(context.master, config_of(context), max_wait_secs=40)
        check(int(s.run(up)) >= 1)
        s.close()
        context.tell("worker-trained")
    else:
        init = tf.global_variables_initializer()
        context.wait_for("worker-started")
        time.sleep(1.5)
        s = manager.prepare_session(context.master, init_op=init, config=config_of(context))
        context.wait_for("worker-trained")
        check(int(s.run(step)) >= 1)
        s.close()


@case("restart-from-checkpoint", seconds=90)
def restart(context):
    """The program ends, its state is lost (another container), and goes on from its checkpoint."""
    images, labels = _mnist.load(context.data, 2000)

    def program(last):
        with tf.device(setter(context)):
            step = tf.train.get_or_create_global_step()
            model = _mnist.Mlp()
            train = tf.train.AdagradOptimizer(0.05).minimize(model.loss, step)
        first = None
        data = _mnist.batches(images, labels, 50, 0)
        with tf.train.MonitoredTrainingSession(
                context.master, True, checkpoint_dir=context.path("log"), hooks=[tf.train.StopAtStepHook(last_step=last)],
                save_checkpoint_steps=20, save_summaries_steps=10, config=config_of(context)) as s:
            while not s.should_stop():
                x, y = next(data)
                _, loss, now = s.run([train, model.loss, step], {model.x: x, model.y: y})
                first = first if first is not None else (int(now), float(loss))
        return first, float(loss)

    (at, _), end = program(40)
    check(at <= 1, at)
    with tf.Graph().as_default() as g, g.container("workers-restart-again"):
        (at, begin), _ = program(60)
    check(at in (40, 41), "the second run began at step", at)
    check(begin < 1.5 * end + 0.3, "the loss was", end, "and is", begin)


@case("nan-hook")
def nan_hook(context):
    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        v = tf.get_variable("v", initializer=1.0)
        loss = tf.math.log(v)
        up = tf.group(v.assign_sub(1.0), tf.assign_add(step, 1))
    try:
        with tf.train.MonitoredTrainingSession(context.master, True, hooks=[tf.train.NanTensorHook(loss)], config=config_of(context)) as s:
            for _ in range(5):
                s.run([loss, up])
        check(False, "no error though the loss is not a number")
    except tf.train.NanLossDuringTrainingError:
        pass


@case("step-fn-and-scaffold")
def step_fn(context):
    """A Scaffold with functions of its own, and run_step_fn."""
    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        v = tf.get_variable("v", initializer=0.0)
        w = tf.get_variable("w", initializer=0.0, collections=[tf.GraphKeys.LOCAL_VARIABLES])
        up = tf.group(v.assign_add(1.0), tf.assign_add(step, 1))
        put = v.assign(10.0).op
    scaffold = tf.train.Scaffold(init_fn=lambda _, s: s.run(put))
    with tf.train.MonitoredTrainingSession(context.master, True, scaffold=scaffold, config=config_of(context)) as s:
        def once(step_context):
            step_context.session.run(up)
            value = step_context.run_with_hooks(v)
            if value > 12.5:
                step_context.request_stop()
            return value

        values = []
        while not s.should_stop():
            values.append(float(s.run_step_fn(once)))
    # The call that asks to stop returns nothing.
    check(values == [11.0, 12.0], values)


@case("profiler-hook")
def profiler(context):
    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        up = tf.assign_add(step, 1)
    hooks = [tf.train.ProfilerHook(save_steps=3, output_dir=context.path("profile")), tf.train.StopAtStepHook(last_step=7)]
    with tf.train.MonitoredTrainingSession(context.master, True, hooks=hooks, config=config_of(context)) as s:
        while not s.should_stop():
            s.run(up)
    check(any(n.startswith("timeline-") for n in os.listdir(context.path("profile"))), os.listdir(context.path("profile")))


@case("recovers-after-reset", seconds=90)
def recovers(context):
    """Somebody resets the master: a monitored session makes itself a new session and goes on from its checkpoint."""
    with tf.device(setter(context)):
        step = tf.train.get_or_create_global_step()
        up = tf.assign_add(step, 1)
    seen = []
    with tf.train.MonitoredTrainingSession(
            context.master, True, checkpoint_dir=context.path("log"), save_checkpoint_steps=1, config=config_of(context)) as s:
        for i in range(6):
            if i == 3:
                tf.Session.reset(context.master, ["workers-recovers-after-reset"])
            seen.append(int(s.run(up)))
    check(len(seen) == 6 and seen == sorted(seen) and seen[-1] >= 6, seen)

"use strict";
/* Gives the events of a recorded run durations. Which events there are, in which order each role has them, and who
   waits for
   whom comes from the recording; how long they take comes from rates that the reader can change. */

explore.replay = (() => {
  const OPS = explore.data.timeline.ops;
  // FLOPs and exponentials of a Hopper multiprocessor in a cycle, as in flashtile_lab.analysis.roofline.
  const RATES = { flops: 4096, exps: 16, bytes: 48, latency: 600, issue: 16 };

  const decode = (run) =>
    run.events.map(([role, op, line, a, b, first, last], index) => ({
      index,
      role,
      op: OPS[op],
      line,
      a,
      b,
      first,
      last,
    }));

  // For each barrier and phase, the events that complete it; in the recorded order an arrival counts for the current
  // phase.
  const phasesOf = (run, events) => {
    const state = run.barriers.map(([, count]) => ({ count, pending: count, bytes: 0, phases: [[]] }));
    const close = (s) => {
      if (s.pending === 0 && s.bytes === 0) {
        s.phases.push([]);
        s.pending = s.count;
      }
    };
    for (const e of events) {
      if (!["arrive", "expect", "load"].includes(e.op)) continue;
      const s = state[e.a];
      s.phases[s.phases.length - 1].push(e.index);
      if (e.op === "arrive") s.pending -= e.b;
      else if (e.op === "expect") {
        s.pending -= 1;
        s.bytes += e.b;
      } else s.bytes -= e.b;
      close(s);
    }
    return state.map((s) => s.phases);
  };

  /* options: eager, products are waited for where they start; merged, the producer and the scheduler are part of the
   first
     consumer's stream. */
  const play = (run, rates = RATES, options = {}) => {
    const events = decode(run),
      phases = phasesOf(run, events);
    const streamOf = (role) => (options.merged && run.roles[role] !== "consumer" ? 0 : role);
    const streams = run.roles.map(() => []);
    events.forEach((e) => streams[streamOf(e.role)].push(e));
    const at = streams.map(() => 0),
      clock = streams.map(() => 0),
      free = { tensor: 0, sfu: 0, memory: 0 };
    const products = run.roles.map(() => []),
      stores = run.roles.map(() => []);
    const oldest = (list, outstanding) => Math.max(0, ...list.slice(0, Math.max(0, list.length - outstanding)));

    // When an event could start, or null while it waits for one that has not been played.
    const ready = (e, now) => {
      if (e.op !== "wait" || e.b === 0) return now;
      const needed = phases[e.a][e.b - 1];
      return needed.every((i) => events[i].end !== undefined)
        ? Math.max(now, ...needed.map((i) => events[i].end))
        : null;
    };
    const engine = (name, from, cycles) => {
      const start = Math.max(from, free[name]);
      free[name] = start + cycles;
      return start;
    };
    const perform = (e, now, from) => {
      e.start = now;
      switch (e.op) {
        case "wait":
          e.end = from;
          return from;
        case "arrive":
        case "expect":
          e.end = now + rates.issue;
          return e.end;
        case "load":
        case "store": {
          const issued = now + rates.issue;
          e.busyFrom = engine("memory", issued, e.b / rates.bytes);
          e.end = e.busyFrom + e.b / rates.bytes + rates.latency;
          if (e.op === "store") stores[e.role].push(e.end);
          e.issued = issued;
          return issued;
        }
        case "product": {
          e.issued = now + rates.issue;
          e.busyFrom = engine("tensor", e.issued, e.a / rates.flops);
          e.end = e.busyFrom + e.a / rates.flops;
          products[e.role].push(e.end);
          return options.eager ? e.end : e.issued;
        }
        case "product_wait":
          e.end = Math.max(now, oldest(products[e.role], e.a));
          return e.end;
        case "store_wait":
          e.end = Math.max(now, oldest(stores[e.role], e.a));
          return e.end;
        default: {
          e.busyFrom = engine("sfu", now, e.a / rates.exps);
          e.end = e.busyFrom + e.a / rates.exps;
          return e.end;
        }
      }
    };

    for (let played = 0; played < events.length; played += 1) {
      let chosen = -1,
        from = Infinity;
      streams.forEach((stream, s) => {
        if (at[s] === stream.length) return;
        const when = ready(stream[at[s]], clock[s]);
        if (when !== null && when < from) {
          chosen = s;
          from = when;
        }
      });
      if (chosen < 0) throw new Error("the recording does not play to its end");
      const e = streams[chosen][at[chosen]];
      clock[chosen] = perform(e, clock[chosen], from);
      at[chosen] += 1;
    }
    const cycles = Math.max(...events.map((e) => e.end));
    const work = (op, rate) => events.filter((e) => e.op === op).reduce((sum, e) => sum + e.a / rate, 0);
    return {
      events,
      phases,
      cycles,
      tensor: work("product", rates.flops) / cycles,
      sfu: work("exp", rates.exps) / cycles,
    };
  };

  // When each shared buffer held something: from the end of a phase of its full barrier to that of its empty one.
  const buffers = (run, played, span) => {
    const number = Object.fromEntries(run.barriers.map(([name], i) => [name, i]));
    const doneAt = (barrier, k) => {
      const needed = played.phases[barrier][k];
      return needed && needed.length ? Math.max(...needed.map((i) => span(played.events[i])[1])) : null;
    };
    return run.barriers
      .filter(([name]) => name.includes(".full") && !name.startsWith("tiles"))
      .map(([name]) => {
        const full = number[name],
          empty = number[name.replace("full", "empty")],
          held = [];
        // The last phase is the one that never ended.
        for (let k = 0; k + 1 < played.phases[full].length; k += 1)
          held.push([doneAt(full, k), k + 1 < played.phases[empty].length ? doneAt(empty, k) : null]);
        return { name: name.replace(".first.full", ""), held };
      })
      .sort((a, b) => d3.ascending(a.name, b.name));
  };

  return { RATES, play, buffers };
})();

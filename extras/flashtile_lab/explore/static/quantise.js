"use strict";
/* Rounding to e4m3 and the signed Hadamard rotation. */

explore.quantise = (() => {
  const LARGEST = 448,
    LEAST_EXPONENT = -6;

  // The nearest e4m3 number (float8_e4m3fn), ties to even; beyond the largest it saturates, as scaled inputs need.
  const e4m3 = (x) => {
    if (Number.isNaN(x) || x === 0) return x;
    const size = Math.min(Math.abs(x), LARGEST);
    let exponent = Math.floor(Math.log2(size));
    // log2 rounds: just below a power of two it may give that power's exponent.
    if (2 ** exponent > size) exponent -= 1;
    const unit = 2 ** (Math.max(exponent, LEAST_EXPONENT) - 3),
      steps = size / unit,
      low = Math.floor(steps),
      rest = steps - low;
    const rounded = rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
    return Math.sign(x) * Math.min(LARGEST, rounded * unit);
  };

  const largest = (rows) => rows.reduce((top, row) => row.reduce((a, x) => Math.max(a, Math.abs(x)), top), 0);

  // Rows in e4m3 with one scale for so many rows, back as numbers.
  const rows = (x, rowsPerScale) => {
    const found = [];
    for (let from = 0; from < x.length; from += rowsPerScale) {
      const part = x.slice(from, from + rowsPerScale),
        scale = largest(part) / LARGEST || 1;
      found.push(...part.map((row) => row.map((each) => e4m3(each / scale) * scale)));
    }
    return found;
  };

  // Multiplies by random signs, then by the orthonormal Hadamard matrix, in d log d additions; d is a power of two.
  const rotate = (row, signs) => {
    const made = row.map((x, i) => x * signs[i]);
    for (let half = 1; half < made.length; half *= 2)
      for (let i = 0; i < made.length; i += 2 * half)
        for (let j = i; j < i + half; j += 1)
          [made[j], made[j + half]] = [made[j] + made[j + half], made[j] - made[j + half]];
    return made.map((x) => x / Math.sqrt(made.length));
  };

  const signs = (d, seed = 5) => {
    const draw = explore.attention.normals(seed);
    return Array.from({ length: d }, () => (draw() < 0 ? -1 : 1));
  };

  return { LARGEST, e4m3, rows, rotate, signs };
})();

// Three million objects. Each lives until 65,536 others have been made, and is looked at then.
const alive = new Array(65536).fill(null);
let sum = 0;
for (let n = 0; n < 3000000; n++) {
    const old = alive[n % alive.length];
    if (old !== null) sum += old.number % 11 + old.name.length + old.values[1];
    alive[n % alive.length] = { number: n, name: `object ${n % 1000}`, values: [n, n % 7, null] };
}
process.exit(sum === 52497484 ? 42 : 1);

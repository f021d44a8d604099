# program: OCaml, bytecode
# does: sorts, hashes, exceptions, signals
# needs: ocaml
# version: ocaml -version
# seconds: 60
cat > a.ml <<'C'
let rec fib n = if n < 2 then n else fib (n - 1) + fib (n - 2)
exception Deep
let rec deep n = if n = 0 then raise Deep else 1 + deep (n - 1)
let () =
  Printf.printf "%d %d\n" (fib 24) (Hashtbl.hash (List.init 1000 string_of_int));
  (try ignore (deep 10000) with Deep -> print_endline "deep");
  let a = Array.init 100000 (fun i -> i * 7919 mod 100003) in Array.sort compare a; Printf.printf "%d %d %.12f\n" a.(0) a.(99999) (sin 1e5)
C
ocaml a.ml

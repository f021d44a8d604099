# program: Erlang
# does: ten thousand processes, its compiler for the processor
# needs: erl
# version: erl -noshell -eval 'io:format("~s", [erlang:system_info(otp_release)]), halt().'
# memory: 1G
# seconds: 100
export HOME=$PWD
erl -noshell -eval 'P = self(), [spawn(fun() -> P ! {I, lists:sum(lists:seq(1, I rem 100))} end) || I <- lists:seq(1, 10000)],
 S = lists:sum([receive {I, V} -> V end || I <- lists:seq(1, 10000)]), io:format("~p ~p ~p~n", [S, erlang:phash2(lists:seq(1,1000)), math:sin(1.0e5)]), halt().'

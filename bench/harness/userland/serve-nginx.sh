# A page of 1 KiB on the port that is the first argument; one worker, which is the server itself.
folder=/tmp/nginx-$1
/bin/busybox rm -rf $folder && /bin/busybox mkdir -p $folder/pages || exit 1
/bin/busybox head -c 1024 /bench/python.py > $folder/pages/page
/bin/busybox cat > $folder/nginx.conf <<END
daemon off; master_process off; pid $folder/pid; error_log $folder/errors;
events { worker_connections 256; }
http {
    access_log off; sendfile on; keepalive_requests 1000000000; open_file_cache max=10;
    client_body_temp_path $folder/a; proxy_temp_path $folder/b; fastcgi_temp_path $folder/c;
    uwsgi_temp_path $folder/d; scgi_temp_path $folder/e;
    server { listen $1; root $folder/pages; }
}
END
exec /usr/sbin/nginx -p $folder -e $folder/errors -c $folder/nginx.conf

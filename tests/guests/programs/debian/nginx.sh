# The host fetches the page afterwards.
cp /mnt/page /var/www/html
systemctl is-active nginx

// Compares what folders say of their entries' inode numbers with what the entries say themselves.
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

int main(int count, char **folders) {
    int entries = 0, different = 0;
    for (int i = 1; i < count; i++) {
        DIR *folder = opendir(folders[i]);
        struct stat own;
        if (!folder || fstat(dirfd(folder), &own)) continue;
        for (struct dirent *entry; (entry = readdir(folder));) {
            struct stat stat;
            if (!strcmp(entry->d_name, "..") || fstatat(dirfd(folder), entry->d_name, &stat, AT_SYMLINK_NOFOLLOW)) continue;
            // Where something is mounted, a folder tells of what is below.
            if (stat.st_dev != own.st_dev) continue;
            entries++;
            if (stat.st_ino == entry->d_ino) continue;
            if (different++ < 5) printf("%s/%s: %lu, %lu\n", folders[i], entry->d_name, entry->d_ino, stat.st_ino);
        }
        closedir(folder);
    }
    printf("%d entries, %d differ\n", entries, different);
}

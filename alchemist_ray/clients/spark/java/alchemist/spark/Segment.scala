package alchemist.spark

import java.io.IOException
import java.nio.MappedByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.{Files, Path, Paths}
import java.nio.file.StandardOpenOption.{READ, WRITE}
import java.nio.file.attribute.BasicFileAttributes

import scala.collection.mutable

import io.netty.util.internal.PlatformDependent
import org.apache.spark.sql.execution.columnar.Internals
import org.apache.spark.unsafe.Platform

/** Memory of a rank, mapped into this process for all its tasks.
  *
  * The mapping is kept for the next transfer, because page faults take longer than to copy the
  * elements. Unused, it is dropped after 10 s: it holds the memory of ranks that are gone.
  */
private[spark] final class Segment private (path: Path, nbytes: Long) {
  import Segment._

  private val mapped = new mutable.ArrayBuffer[MappedByteBuffer]
  private val windows = { // addresses; each window reaches to the end of the next
    val file = FileChannel.open(path, READ, WRITE)
    try {
      if (file.size < nbytes) { // to map more would make the file larger
        throw new IOException(s"$path has ${file.size} of $nbytes bytes")
      }
      for (start <- 0L until nbytes by WINDOW) {
        val length = math.min(2 * WINDOW - WORD, nbytes - start)
        mapped += file.map(FileChannel.MapMode.READ_WRITE, start, length)
      }
    } catch {
      case error: Throwable =>
        mapped.foreach(Internals.dispose)
        throw error
    } finally file.close()
    mapped.map(PlatformDependent.directBufferAddress(_)).toArray
  }
  // Whether each NEAR_FAULT bytes were read, and so are mapped.
  private val read = new Array[Boolean](((nbytes + NEAR_FAULT - 1) / NEAR_FAULT).toInt)
  private var users = 0
  private var released = 0L // the time
  @volatile private var touched: Byte = 0

  def release(): Unit = kept.synchronized {
    users -= 1
    released = System.currentTimeMillis
    if (cleaner == null) {
      cleaner = new Thread(() => clean(), "alchemist-segments")
      cleaner.setDaemon(true)
      cleaner.start()
    }
  }

  /** Drop the mapping if it is idle; whether it was. */
  private def dropped(): Boolean = {
    val idle = users == 0 && System.currentTimeMillis - released >= IDLE_MS
    if (idle) mapped.foreach(Internals.dispose)
    idle
  }

  /** The address of some bytes. The JVM does not check accesses to it. */
  def address(at: Long, length: Long): Long = {
    if (at < 0 || length < 0 || at > nbytes - length || length > MOST) {
      throw new IndexOutOfBoundsException(s"$length bytes at $at of $nbytes")
    }
    val address = windows((at / WINDOW).toInt) + at % WINDOW
    var k = at / NEAR_FAULT
    while (k * NEAR_FAULT < at + length) {
      if (!read(k.toInt)) { // a fault of a write would map one page only
        touched = Platform.getByte(null, address + math.max(0, k * NEAR_FAULT - at))
        read(k.toInt) = true
      }
      k += 1
    }
    address
  }
}

private[spark] object Segment {
  private val IDLE_MS = 10000L // as IDLE_S of node_connections.py
  private val WINDOW = 1L << 30 // Java maps at most 2 GiB at once
  private val WORD = 8
  private val NEAR_FAULT = 64L << 10 // bytes that Linux maps when one is read

  /** The most bytes that have one address. */
  val MOST: Long = WINDOW - WORD

  private val kept = new mutable.HashMap[(Any, Long), Segment] // by file and size
  private var cleaner: Thread = _

  /** Map a file, or use the mapping of another transfer; `release` follows. */
  def open(name: String, nbytes: Long): Segment = {
    val path = Paths.get(name)
    val file = Files.readAttributes(path, classOf[BasicFileAttributes]).fileKey
    kept.synchronized { // the file exists as long as its mapping
      val found = kept.getOrElseUpdate((file, nbytes), new Segment(path, nbytes))
      found.users += 1
      found
    }
  }

  /** Drop mappings that are idle, until there are none. */
  private def clean(): Unit = kept.synchronized {
    while (kept.nonEmpty) {
      kept.wait(IDLE_MS / 4)
      kept.retain((_, one) => !one.dropped())
    }
    cleaner = null
  }
}
